# SPDX-License-Identifier: Apache-2.0
"""The page that takes a model, a card and a number of tokens, and shows its plans: computed when the site is built.

The planner in the browser would be Pyodide with its packages, 10 MB and seconds before the first answer; all plans that
can be asked for here are 40 KB, and there at once. Other models, cards and options are for `offload plan`.
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from html import escape
from typing import Any

from skill_tools.__main__ import main
from skill_tools.bundle import knowledge_path

CARDS = {
    "rtx3090": "128GB", "rtx4090": "128GB", "rtx5090": "128GB", "l40s": "256GB", "a100-80gb": "512GB", "h100": "1TB",
    "h200": "1TB",
}  # fmt: skip
TOKENS = (2048, 8192, 32768)
_MOST_PLANS = 5


@cache
def page() -> str:
    """Return the page with all plans in it."""
    models = sorted(path.stem for path in knowledge_path("traces").glob("*.json"))
    plans = {
        f"{model} {card} {tokens}": _plans(model, card, tokens)
        for model in models
        for card in CARDS
        for tokens in TOKENS
    }
    choices = {"Model": models, "Card": list(CARDS), "Tokens": list(map(str, TOKENS))}
    fields = "".join(
        f'<label>{name} <select id="plan-{name.lower()}">'
        + "".join(f"<option>{escape(each)}</option>" for each in values)
        + "</select></label> "
        for name, values in choices.items()
    )
    data = json.dumps(plans, separators=(",", ":")).replace("</", "<\\/")
    return (
        "# Plan a model\n\nTraining all weights with AdamW on one card, one sequence a step, in bf16: what "
        "fits, and what it costs. "
        "The models are those whose traces ship, and each card stands in a host of the memory named with the answer. "
        "Adapters, several cards, your own configuration and every other model: `offload plan`.\n\n"
        f'<p class="planner">{fields}</p>\n\n<div id="plan-answer" role="status" markdown="0"></div>\n\n'
        f'<script type="application/json" id="plan-hosts">{json.dumps(CARDS)}</script>\n'
        f'<script type="application/json" id="plan-data">{data}</script>\n'
    )


def _plans(model: str, card: str, tokens: int) -> Any:
    """Return the fastest plans that fit, as rows, or why there is none."""
    words = ["plan", "--framework", "pytorch", "--model", model, "--gpu", card, "--host-memory", CARDS[card]]
    words += ["--format", "json", "--overrides", f"seq_length={tokens}", "micro_batch_size=1"]
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        main(words)
    document = json.loads(out.getvalue())
    if "recommendation" not in document:
        return document["errors"][0]["message"].partition("; try")[0]
    options = [document["as_it_is"], document["recommendation"]["option"], *document.get("alternatives", ())]
    fitting = {option["label"]: option for option in options if option["fits"]}
    fastest = sorted(fitting.values(), key=lambda option: option["time"]["step_s"])[:_MOST_PLANS]
    return [_row(option) for option in fastest]


def _row(option: Any) -> list[Any]:
    """Return label, GiB of the GPU and of the host, least and most seconds of a step, and its ratio to none."""
    memory, time = option["memory"], option["time"]
    return [
        option["label"],
        round(memory["device_bytes"] / 2**30, 1),
        round(memory["host_bytes_per_node"] / 2**30, 1),
        float(f"{time.get('least_s', time['step_s']):.3g}"),
        float(f"{time.get('most_s', time['step_s']):.3g}"),
        round(time["ratio"], 2),
    ]
