# SPDX-License-Identifier: Apache-2.0
"""TOML and options of torchtitan, and our reader's values of them."""

import shlex
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.torchtitan.compose import compose

FLAGS = ["training.enable_cpu_offload", "compile.enable", "checkpoint.create_seed_checkpoint"]
WHOLE = ["training.seq_len", "parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree"]
NUMBERS = ["training.max_norm"]
TEXTS = ["activation_checkpoint.mode", "training.mixed_precision_param", "optimizer.name"]
NAMES = [*FLAGS, *WHOLE, *NUMBERS, *TEXTS]
WORDS = [
    "true", "True", "false", "False", "TRUE", "yes", "no", "1", "0", "2", "8", "1e3", "1_000", "0x10", "010", "2.5",
    "-1", "inf", "nan", "none", "None", "null", "full", "selective", "bfloat16", "float16", "float32", "AdamW", "",
    "auto", "+3", " 3",
]  # fmt: skip
HELD = [
    "true",
    "false",
    "1",
    "0",
    "8",
    "2.5",
    "1_000",
    '"true"',
    '"8"',
    '"full"',
    '"none"',
    '"bfloat16"',
    '"float16"',
    "inf",
    "[1]",
]
_PROVEN = '[job]\ndump_folder = "out"\n'
TABLE = [
    {"text": f"{_PROVEN}[training]\nenable_cpu_offload = true\n", "words": words.split()}
    for words in (
        "", "--training.enable_cpu_offload", "--training.no-enable-cpu-offload", "--training.no_enable_cpu_offload",
        "--training.enable_cpu_offload=false", "--training.enable_cpu_offload False", "--training.seq_len 1_000",
        "--training.seq-len=010", "--training.max_norm 1e-1", "--activation_checkpoint.mode full", "--training.seq_len",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return a TOML and options over it."""
    sections: dict[str, list[str]] = {}
    for name in random.sample(NAMES, random.randint(0, 4)):
        section, _, field = name.partition(".")
        kind = random.random()
        fitting = HELD[:2] if name in FLAGS else HELD[2:7] if name in (*WHOLE, *NUMBERS) else HELD[9:13]
        value = random.choice(fitting if kind < 0.8 or name in FLAGS else HELD)
        sections.setdefault(section, []).append(f"{field} = {value}")
    text = _PROVEN + "".join(
        f"[{name}]\n" + "".join(f"{each}\n" for each in lines) for name, lines in sections.items()
    )
    words: list[str] = []
    for name in random.sample(NAMES, random.randint(0, 3)):
        words += option(random, name, is_flag=name in FLAGS)
    return {"text": text, "words": words}


def option(random: Random, name: str, *, is_flag: bool) -> list[str]:
    """Return the words of one option, some of which the parser refuses; a flag mostly has no value."""
    kind, (section, _, field) = random.random(), name.partition(".")
    if random.random() < 0.3:
        field = field.replace("_", "-")
    if is_flag and kind < 0.8:
        return [random.choice([f"--{section}.{field}", f"--{section}.no-{field}", f"--{section}.no_{field}"])]
    value = random.choice(WORDS)
    if kind < 0.5 and value and not value.startswith("-"):
        return [f"--{section}.{field}", value]
    return [f"--{section}.{field}={value}" if kind < 0.97 else f"--{section}.{field}"]


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the names that are set."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.toml").write_text(asked["text"], encoding="utf-8")
        words = shlex.join(asked["words"])
        script = f"# torchtitan=={release}\ntorchrun -m torchtitan.train --job.config_file run.toml {words}\n"
        config = compose([Source("run.sh", script, Path(folder))], [])
    if config.wrong_types:
        raise ValueError(str(config.wrong_types)[:200])
    return believed_of(config, NAMES)


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each set key has the value that the class gets.

    The class takes any value of a TOML as it is, and the run ends where it is first used: whoever refuses one of
    another type is right.
    """
    if "value" in real and any(_is_odd(name, value) for name, value in real["value"]["map"]):
        return "raised" in mine
    if "value" in real and "value" in mine:
        names = {name for name, _ in mine["value"]["map"]}
        real = {"value": {"map": [each for each in real["value"]["map"] if each[0] in names]}}
    return same_values(real, mine)


def _is_odd(name: str, value: Any) -> bool:
    if name in FLAGS:
        return not isinstance(value, bool)
    if name == "activation_checkpoint.mode":
        return value not in ("none", "selective", "full", "memory_budget")
    if name == "training.mixed_precision_param":
        return value not in ("bfloat16", "float16", "float32")
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_float = isinstance(value, dict) and "float" in value
    return not (isinstance(value, str) if name in TEXTS else is_number or (is_float and name in NUMBERS))
