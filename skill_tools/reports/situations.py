"""The decision table of a configuration whose model is not known: as text, Markdown or JSON."""

import dataclasses
import json
from collections.abc import Sequence

from skill_tools.planning.search.situations import Situation
from skill_tools.reports.plans_json import SCHEMA_VERSION

_TITLE = "no plan was computed, because the model's shape is not known; the card answers by situation"


def concise(rows: Sequence[Situation]) -> str:
    """Return one block a row: when it applies, what to do and why."""
    blocks = [f"{_TITLE}:"]
    for row in rows:
        mark = " (applies here)" if row.applies else ""
        rule = f" [{row.rule}]" if row.rule else ""
        blocks.append(f"  {row.situation}{mark}\n    -> {row.recommend}: {row.why}{rule}")
    return "\n".join(blocks)


def markdown(rows: Sequence[Situation]) -> str:
    """Return a Markdown table."""
    head = f"{_TITLE}.\n\n| Situation | Do | Why | Rule |\n|---|---|---|---|"
    return "\n".join(
        [head, *(f"| {row.situation} | {row.recommend} | {row.why} | {row.rule} |" for row in rows)]
    )


def as_json(rows: Sequence[Situation], problem: str) -> str:
    """Return the document of `schema/plan.schema.json` with kind `by-situation`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "errors": [{"kind": "unusable-input", "message": problem}],
        "kind": "by-situation",
        "decisions": [dataclasses.asdict(row) for row in rows],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
