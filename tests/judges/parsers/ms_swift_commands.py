# SPDX-License-Identifier: Apache-2.0
"""Files and command lines of `swift sft`, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import hf_arguments
from hf_arguments import FLAGS, NUMBERS, WHOLE

from skill_tools.configs.source import Source
from skill_tools.dialects.ms_swift.compose import compose

NAMES = [
    *(name for name in FLAGS if name != "bf16_full_eval"), *WHOLE, *NUMBERS, "packing", "padding_free", "lora_rank",
]  # fmt: skip
_MODEL = "--model=some/model"


def _asked(text: str | None, words: list[str], suffix: str = ".yaml") -> dict[str, Any]:
    return {"text": text, "words": words, "suffix": suffix}


TABLE = [
    *(
        _asked(f"model: some/model\n{line}\n", words.split())
        for line, words in (
            ("max_grad_norm: null", ""), ("gradient_checkpointing: null", ""),
            ('gradient_checkpointing: "no"', ""), ("learning_rate: 1e-5", ""), ("save_only_model: on", ""),
            ("save_only_model: true", "--save_only_model false"), ("save_only_model: true\nsave_only_model: false", ""),
            ("max_steps: 1e3", ""), ("max_steps: 10", "--max_step 4"), ("model: [a, b]", ""), ("max_steps: [1]", ""),
        )
    ),
    *(
        _asked(None, [_MODEL, *words.split()])
        for words in (
            "--save_only_model", "--save_only_mod yes", "--save-only-model on", "--no_save_only_model",
            "--max_steps 1e3", "--gradient_checkpointing no", "--deepspeed zero3", "--save_only_model maybe",
            "save_only_model true",
        )
    ),
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a file in YAML or JSON with options behind it, or options alone."""
    kind = random.random()
    words = hf_arguments.option_words(random, NAMES)
    if kind < 0.45:
        return _asked(None, [_MODEL, *words])
    words = words if random.random() < 0.4 else []
    if kind < 0.6:
        text = hf_arguments.json_text(random, NAMES)
        return _asked(f'{{"model": "some/model", {text[1:]}', words, ".json")
    text = "model: some/model\n" + hf_arguments.file_text(random, NAMES, hf_arguments.BARE)
    return _asked(text, words)


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the arguments that are set."""
    with tempfile.TemporaryDirectory() as folder:
        words = asked["words"]
        if asked["text"] is not None:
            Path(folder, f"run{asked['suffix']}").write_text(asked["text"], encoding="utf-8")
            words = [f"run{asked['suffix']}", *words]
        script = f"# ms-swift=={release}\nswift sft {shlex.join(words)}\n"
        config = compose([Source("run.sh", script, Path(folder))], [])
    refused = config.wrong_types or config.unknown or config.faults
    if refused:
        raise ValueError(str(refused)[:200])
    return {
        name: setting.value
        for setting in config.settings.values()
        for name in [setting.written.lstrip("-").replace("-", "_")]
        if name in NAMES
    }


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each set argument has the class's value."""
    if "raised" in real or "raised" in mine:
        return "raised" in real and "raised" in mine
    held = dict(real["value"]["map"])
    return all(_same(held[name], value) for name, value in mine["value"]["map"] if name in held)


def _same(held: Any, believed: Any) -> bool:
    numbers = [
        float(each["float"]) if isinstance(each, dict) and "float" in each else each
        for each in (held, believed)
    ]
    return bool(numbers[0] == numbers[1]) or all(each != each for each in numbers)
