# SPDX-License-Identifier: Apache-2.0
"""Recipes and options of a script with `HfArgumentParser` alone, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import hf_arguments
from hf_arguments import NAMES

from skill_tools.configs.source import Source
from skill_tools.dialects.transformers.compose import compose

# These prove the script's command to be a Trainer's, and are never asked for.
_KNOWN = ["--logging_steps=5", "--save_steps=10", "--seed=1", "--output_dir=out"]
_KNOWN_TEXT = "logging_steps: 5\nsave_steps: 10\nseed: 1\noutput_dir: out\n"


def _asked(text: str | None, words: list[str], suffix: str = ".yaml") -> dict[str, Any]:
    return {"text": text, "words": words, "suffix": suffix}


TABLE = [
    _asked(None, [*_KNOWN, *words.split()])
    for words in (
        "--gradient_checkpointing no", "--gradient_checkpointing=on", "--save_only_model", "--save_only_mod true",
        "--no_save_only_model", "--max_steps 1e3", "--learning_rate 1e-5", "--max_grad_norm None",
    )
] + [
    _asked(f"{_KNOWN_TEXT}{line}\n", [])
    for line in (
        'gradient_checkpointing: "no"', 'save_only_model: "false"', "learning_rate: 1e-5", "learning_rate: 1.0e-5",
        "gradient_checkpointing: null", "max_steps: 1e3", 'max_steps: "4"', "save_only_model: ''",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a recipe in YAML or JSON, or options."""
    kind = random.random()
    if kind < 0.4:
        return _asked(_KNOWN_TEXT + hf_arguments.file_text(random, NAMES, hf_arguments.BARE), [])
    if kind < 0.5:
        text = hf_arguments.json_text(random, NAMES)
        return _asked(f'{{"logging_steps": 5, "save_steps": 10, "seed": 1, {text[1:]}', [], ".json")
    return _asked(None, [*_KNOWN, *hf_arguments.option_words(random, NAMES)])


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the arguments that are set."""
    with tempfile.TemporaryDirectory() as folder:
        words = asked["words"]
        if asked["text"] is not None:
            Path(folder, f"recipe{asked['suffix']}").write_text(asked["text"], encoding="utf-8")
            words = [f"recipe{asked['suffix']}"]
        text = f"torchrun --nproc_per_node 2 train.py {shlex.join(words)}\n"
        config = compose([Source("train.sh", text, Path(folder))], [])
    return believed(config)


def believed(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by the names of the arguments; raise for words that it refuses."""
    if config.wrong_types or config.unknown:
        raise ValueError(str(config.wrong_types or config.unknown)[:200])
    return {
        setting.written.removeprefix("--").replace("-", "_"): setting.value
        for setting in config.settings.values()
        if setting.written.removeprefix("--") in NAMES
    }
