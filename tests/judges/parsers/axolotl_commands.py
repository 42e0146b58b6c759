# SPDX-License-Identifier: Apache-2.0
"""Files and command lines of Axolotl, and our reader's values of them."""

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from skill_tools.configs.source import Source
from skill_tools.dialects.axolotl.compose import compose

BASE = "base_model: some/model\n"
VALUES = [
    'true', 'false', 'True', 'False', 'TRUE', 'yes', 'no', 'on', 'off', 'y', 'n', 't', 'f', '1', '0', 'null',
    '~', 'None', 'none', 'auto', 'hidden_states', 'disk', 'offload', 'legacy', '010', '0x10', '1e3', '2e-5',
    '1.0', '-1', '1_000', '""', '3.5', 'some/path', 'a,b', '[a,b]', '{a:b}', "'x'", '10-5', 'a.b', '(1)', '007',
    '1e', '0b1', 'nan', 'inf', 'é', '10:20', '#',
]  # fmt: skip
HELD = ["true", "false", "1", "2.5", "text", "null", '"true"', "[a]", "0"]
VALUED = [
    "activation_offloading",
    "gradient_checkpointing",
    "micro_batch_size",
    "sequence_len",
    "learning_rate",
    "optimizer",
    "bf16",
    "deepspeed",
    "fsdp_version",
    "max_steps",
    "lora_r",
]
FLAGS = [
    "layer_offloading",
    "load_in_4bit",
    "sample_packing",
    "lora_target_linear",
    "fsdp_config.offload_params",
    "fsdp_config.cpu_offload_pin_memory",
]
TABLE = [
    {"text": f"{BASE}activation_offloading: true\n", "words": [*words], "launcher": launcher}
    for launcher in ("accelerate", "python")
    for words in [
        *(
            ["--activation-offloading", each]
            for each in (
                "hidden_states",
                "on",
                "y",
                "t",
                "auto",
                "null",
                "~",
                "true",
                "1",
                "yes",
                "0",
                "None",
            )
        ),
        ["--activation_offloading", "false"],
        ["--no-activation-offloading"],
        ["activation_offloading=false"],
        ["--activation-offloading"],
        ["--gradient-checkpointing", "offload"],
    ]
] + [
    {"text": f"{BASE}micro_batch_size: 2\n", "words": ["--micro-batch-size", each], "launcher": launcher}
    for launcher in ("accelerate", "python")
    for each in ("010", "0x10", "null", "~", "1e3")
]


def question(random: Random) -> dict[str, Any]:
    """Return a file, options over it and the launcher."""
    lines = [BASE]
    for name in random.sample(VALUED, random.randint(1, 5)):
        lines.append(f"{name}: {random.choice(HELD)}\n")
    if random.random() < 0.3:
        lines.append("fsdp_config:\n  offload_params: true\n")
    words: list[str] = []
    for _ in range(random.randint(1, 3)):
        kind = random.random()
        name = random.choice(VALUED if kind < 0.75 else FLAGS)
        option = "--" + name.replace("_", "-")
        if kind > 0.97:
            words.append(
                random.choice([f"--{name}", f"--no-{name.replace('_', '-')}", f"{name}=false", f"--{name}=1"])
            )
        elif kind >= 0.75:
            words.append(random.choice([option, f"--no-{option[2:]}"]))
        else:
            value = random.choice(VALUES)
            words += [f"{option}={value}"] if random.random() < 0.5 else [option, value]
    return {
        "text": "".join(lines),
        "words": words,
        "launcher": random.choice(["accelerate", "torchrun", "python"]),
    }


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values, and its words for the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(asked["text"], encoding="utf-8")
        words = " ".join(f"'{word}'" if "'" not in word else json.dumps(word) for word in asked["words"])
        text = f"axolotl train run.yaml --launcher {asked['launcher']} {words}\n"
        source = Source("train.sh", text, Path(folder)).stating(lambda: {"axolotl": release})
        config = compose([source], [])
    if any(wrong.expected == "a value after the option" for wrong in config.wrong_types):
        raise ValueError("an option without a value")
    return {key: setting.value for key, setting in config.settings.items()}


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each value set by an option is the one validated next by the framework."""
    if "raised" in real or "raised" in mine:
        return "raised" in real and "raised" in mine
    held = dict(dict(real["value"]["map"])["config"]["map"])
    believed = dict(mine["value"]["map"])
    for name in (*VALUED, *FLAGS):
        section, dot, field = name.partition(".")
        there = held.get(section)
        if dot:
            there = dict(there["map"]).get(field) if isinstance(there, dict) and "map" in there else None
        if not _same(there, believed.get(name)):
            return False
    return True


def _same(there: Any, believed: Any) -> bool:
    """Return whether pydantic makes the same of a value as our key table does; values that neither takes are alike."""
    return _lax(there) == _lax(believed)


def _lax(value: Any) -> Any:
    if isinstance(value, dict) and "float" in value:
        value = float(value["float"])
    if isinstance(value, str):
        lowered = value.lower()
        if lowered in ("true", "yes", "on", "y", "t", "1"):
            return True
        if lowered in ("false", "no", "off", "n", "f", "0"):
            return False
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float) and value != value:
        return "nan"
    return value
