# SPDX-License-Identifier: Apache-2.0
"""Recipes and options of `trl sft`, and our reader's values of them."""

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import yaml

from skill_tools.configs.source import Source
from skill_tools.dialects.transformers.compose import compose

FLAGS = [
    "gradient_checkpointing",
    "activation_offloading",
    "auto_find_batch_size",
    "use_liger_kernel",
    "save_only_model",
]
OPTIONAL = ["bf16", "activation_checkpointing"]
NUMBERS = [
    "max_steps",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "learning_rate",
    "max_grad_norm",
]
TEXTS = [
    "true",
    "True",
    "false",
    "FALSE",
    "yes",
    "no",
    "y",
    "n",
    "t",
    "f",
    "1",
    "0",
    "on",
    "off",
    "auto",
    "None",
    "null",
    "2",
    "",
]
COUNTS = ["1", "8", "1e3", "1_000", "0x10", "2.5", "-1", "2e-5", "many", "010", " 3", "inf"]
_WORDS = (
    "--no_activation_offloading", "--no_gradient_checkpointing", "--activation_off true", "--activation_offloadin true",
    "--activation-off true", "--max_steps 1e3", "--activation_offloading on", "--activation_offloading",
)  # fmt: skip
TABLE: list[dict[str, Any]] = [
    *({"recipe": None, "words": words.split()} for words in _WORDS),
    {"recipe": {"gradient_checkpointing": None}, "words": []},
    {"recipe": {"activation_checkpointing": "no"}, "words": []},
    {"recipe": {"max_steps": "1e3"}, "words": []},
    {"recipe": {"cpu_offload": True}, "words": []},
    {"recipe": None, "words": ["--activation_checkpointing_k", '{"offload": true}']},
]


def question(random: Random) -> dict[str, Any]:
    """Return a recipe, or none, and options over it."""
    recipe = None
    if random.random() < 0.5:
        recipe = {
            name: random.choice([True, False, None, *TEXTS])
            for name in random.sample(FLAGS, random.randint(1, 3))
        }
        recipe |= {
            name: random.choice([1, 8, *COUNTS]) for name in random.sample(NUMBERS, random.randint(0, 2))
        }
    words: list[str] = []
    for name in random.sample([*FLAGS, *OPTIONAL, *NUMBERS], random.randint(0, 3)):
        written = random.choice([name] * 4 + [name.replace("_", "-")] * 2 + [_cut(random, name)])
        if name not in NUMBERS and random.random() < 0.15:
            alone = [f"--{name}"] if name in FLAGS else []
            words.append(random.choice([f"--no_{name}", f"--no-{name.replace('_', '-')}", *alone]))
            continue
        value = random.choice(COUNTS if name in NUMBERS else TEXTS)
        words += [f"--{written}={value}"] if random.random() < 0.4 else [f"--{written}", value]
    return {"recipe": recipe, "words": words}


def _cut(random: Random, name: str) -> str:
    """Return a start of a name that fits no other argument of the command."""
    if name == "bf16":
        return name
    least = {
        "gradient_checkpointing": 24,
        "gradient_accumulation_steps": 10,
        "activation_checkpointing": 26,
    }.get(name, 0)
    end = random.randint(max(least, name.rfind("_") + 3), len(name)) if least <= len(name) else len(name)
    return name[:end]


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the arguments, the value of each that is set."""
    with tempfile.TemporaryDirectory() as folder:
        words = " ".join(json.dumps(word) for word in asked["words"])
        named = ""
        if asked["recipe"] is not None:
            Path(folder, "recipe.yaml").write_text(yaml.safe_dump(asked["recipe"]), encoding="utf-8")
            named = "--config recipe.yaml"
        config = compose([Source("train.sh", f"trl sft {named} {words}\n", Path(folder))], [])
    if config.wrong_types or config.unknown:
        raise ValueError(str(config.wrong_types or config.unknown)[:200])
    return {
        name: config.settings[name].value for name in (*FLAGS, *OPTIONAL, *NUMBERS) if name in config.settings
    }


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each set argument has the class's value; None and false are alike there."""
    if "raised" in real or "raised" in mine:
        return "raised" in real and "raised" in mine
    held = dict(real["value"]["map"])
    return all(_plain(held[name]) == _plain(value) for name, value in mine["value"]["map"])


def _plain(value: Any) -> Any:
    value = float(value["float"]) if isinstance(value, dict) else value
    return value or False
