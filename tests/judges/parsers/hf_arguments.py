# SPDX-License-Identifier: Apache-2.0
"""Files and command lines of the programs that parse with `HfArgumentParser`, and how answers about them compare.

The parser itself (a recipe as the only argument, or options), LLaMA-Factory and ms-swift hand their values to it in
ways of their own; the values that are tried are the same.
"""

import json
from random import Random
from typing import Any

FLAGS = ["gradient_checkpointing", "save_only_model", "use_cpu", "auto_find_batch_size", "bf16_full_eval"]
WHOLE = ["per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"]
NUMBERS = ["learning_rate", "max_grad_norm", "weight_decay"]
NAMES = [*FLAGS, *WHOLE, *NUMBERS]
BARE = [
    "true", "True", "FALSE", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "2", "null", "~", "None",
    "", "1e3", "1e-5", "1.0e-5", "2.5", "010", "0x10", "1_000", "-1", "inf", "nan", "auto", "many", "1e", ".5", "5.",
    '"true"', '"false"', '"no"', "'4'", '"1e-5"', "''", "[1, 2]", "{a: 1}", "[a]", "10:20", "2026-01-01", "=", "+3",
]  # fmt: skip
TYPED = [
    "true", "false", "True", "no", "yes", "on", "off", "t", "N", "1", "0", "2", "None", "null", "1e3", "1e-5", "010",
    "0x10", "1_000", "-1", "inf", "nan", "2.5", "many", "", "auto", "+3", " 3", "٣",
]  # fmt: skip


def file_text(random: Random, names: list[str], values: list[str]) -> str:
    """Return a YAML of arguments, some with values of every kind."""
    lines = []
    for name in random.sample(names, random.randint(1, 5)):
        lines.append(f"{name}: {random.choice(values)}")
    if random.random() < 0.03:
        lines.append(lines[0])
    return "".join(f"{line}\n" for line in lines)


def json_text(random: Random, names: list[str]) -> str:
    """Return the same in JSON."""
    values: list[Any] = [
        True,
        False,
        None,
        0,
        1,
        2.5,
        1e-5,
        "true",
        "false",
        "no",
        "",
        "4",
        "1e-5",
        "None",
        [1],
        ["a"],
    ]
    return json.dumps({name: random.choice(values) for name in random.sample(names, random.randint(1, 5))})


def option_words(random: Random, names: list[str]) -> list[str]:
    """Return options, whole or cut short, with values or alone; names that the class lacks are none of them.

    `--no_gradient_checkpointing` is not either: the Trainer's class lacks it and TRL's, which a script may use, has it.
    """
    words: list[str] = []
    for name in random.sample(names, random.randint(1, 4)):
        kind, value = random.random(), random.choice(TYPED)
        if kind > 0.93 and name in FLAGS[1:]:
            words.append(
                random.choice([f"--no_{name}", f"--no-{name.replace('_', '-')}", f"{name}={value or 1}"])
            )
            continue
        if random.random() < 0.12:
            name = name[: random.randint(len(name) - 1, len(name))]
        option = f"--{name.replace('_', '-')}" if random.random() < 0.1 else f"--{name}"
        if kind < 0.45 and value and not value.startswith("-"):
            words += [option, value]
        else:
            words.append(f"{option}={value}" if kind < 0.85 else option)
    return words


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or our value of an argument is the class's.

    Of a switch the truth counts, since programs ask for that alone. A number that arrives as text ends the run when it
    is first used, so that whoever refuses it is right; a value that is neither text nor the number is told by neither.
    """
    if "raised" in real:
        return "raised" in mine
    held = dict(real["value"]["map"])
    is_refused = any(isinstance(held[name], str) for name in (*WHOLE, *NUMBERS) if name in held)
    if "raised" in mine or is_refused:
        return ("raised" in mine) is is_refused or any(_is_odd(name, value) for name, value in held.items())
    return all(_same(name, held[name], value) for name, value in mine["value"]["map"] if name in held)


def _is_odd(name: str, value: Any) -> bool:
    """Return whether an argument has a value of a kind that its class does not expect and nobody looks at."""
    if name in (*WHOLE, *NUMBERS):
        is_part = name in WHOLE and _is_number(value) and not float(value["float"]).is_integer()
        return is_part or value is None or (isinstance(value, bool | list | dict) and not _is_number(value))
    return False if name in FLAGS else not isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, dict) and "float" in value


def _same(name: str, held: Any, believed: Any) -> bool:
    if name in FLAGS:
        return _truth(held) == _truth(believed)
    number = float(held["float"]) if _is_number(held) else held
    mine = float(believed["float"]) if _is_number(believed) else believed
    return bool(number == mine) or (number != number and mine != mine)


def _truth(value: Any) -> bool:
    if _is_number(value):
        return bool(float(value["float"]))
    if isinstance(value, dict):
        return bool(value.get("map") or value.get("text"))
    return bool(value)
