# SPDX-License-Identifier: Apache-2.0
"""Files and command lines of LLaMA-Factory, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import hf_arguments
from hf_arguments import NAMES
from hf_commands import believed

from skill_tools.configs.source import Source
from skill_tools.dialects.llama_factory.compose import compose

_BASE = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: lora\noutput_dir: out\n"
_OPTIONS = ["--model_name_or_path=some/model", "--stage=sft", "--finetuning_type=lora", "--output_dir=out"]


def _asked(text: str | None, words: list[str], suffix: str = ".yaml") -> dict[str, Any]:
    return {"text": text, "words": words, "suffix": suffix}


TABLE = [
    *(
        _asked(f"{_BASE}{line}\n", words.split())
        for line, words in (
            ('gradient_checkpointing: "false"', ""), ('save_only_model: "no"', ""), ("learning_rate: 1e-5", ""),
            ("learning_rate: 1.0e-5", ""), ("max_steps: 1e3", ""), ("save_only_model: true\nsave_only_model: true", ""),
            ("save_only_model: true", "--save_only_model false"), ("save_only_model: true", "save_only_model=false"),
            ("save_only_model: true", "save_only_model="), ("save_only_model: true", "save_only_model"),
            ("save_only_model: true", "--save_only_model=true"), ("save_only_model: true", "max_grad_norm=1e-1"),
            ("save_only_model: true", "nothing=1"), ("nothing: 1", ""), ("learning_rate: 1e-5", "learning_rate=2e-5"),
        )
    ),
    *(
        _asked(None, [*_OPTIONS, *words.split()])
        for words in (
            "--save_only_model on", "--save_only_mod yes", "--gradient_checkpointing", "save_only_model=true",
            "--no_save_only_model", "--max_steps 1e3",
        )
    ),
    _asked('{"stage": "sft", "finetuning_type": "lora", "output_dir": "out"}', [], ".json"),
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a file in YAML or JSON with words over it, or options."""
    kind = random.random()
    if kind < 0.3:
        return _asked(None, [*_OPTIONS, *hf_arguments.option_words(random, NAMES)])
    words = [] if random.random() < 0.5 else _overrides(random)
    if kind < 0.38:
        text = hf_arguments.json_text(random, NAMES)
        return _asked(f'{{"stage": "sft", "output_dir": "out", {text[1:]}', words, ".json")
    return _asked(_BASE + hf_arguments.file_text(random, NAMES, hf_arguments.BARE), words)


def _overrides(random: Random) -> list[str]:
    words = []
    for name in random.sample(NAMES, random.randint(1, 2)):
        value = random.choice([each for each in hf_arguments.BARE if each != "="])
        kind = random.random()
        words.append(f"{name}={value}" if kind < 0.9 else f"--{name}={value}" if kind < 0.95 else name)
    return words


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the arguments that are set."""
    with tempfile.TemporaryDirectory() as folder:
        words = asked["words"]
        if asked["text"] is not None:
            Path(folder, f"run{asked['suffix']}").write_text(asked["text"], encoding="utf-8")
            words = [f"run{asked['suffix']}", *words]
        text = f"llamafactory-cli train {shlex.join(words)}\n"
        source = Source("train.sh", text, Path(folder)).stating(lambda: {"llamafactory": release})
        config = compose([source], [])
        if release == "0.9.5" and any(fault.rule == "lf-json-file" for fault in config.faults):
            raise ValueError("JSON")
    return believed(config)
