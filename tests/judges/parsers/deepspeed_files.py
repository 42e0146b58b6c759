# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed files, and our reader's values of them: odd values, keys twice, and keys that a release lacks."""

import json
from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.keys import load_key_table
from skill_tools.dialects.read import read_text
from skill_tools.rules.finding import Severity
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.lint import lint
from skill_tools.rules.values import default

Answer = dict[str, Any]
DEEPSPEED = "deepspeed"
SECTIONS = ("zero_optimization", "compile", "bf16", "fp16")
_LATER = ("compile.", "zero_optimization.zenflow.", "zero_optimization.leaf_module.")
_LOSS_SCALING = (
    "fp16.loss",
    "fp16.initial",
    "fp16.min",
    "fp16.hyst",
    "fp16.consecutive",
)  # no rule reads these
_FILLED = "zero_optimization.overlap_comm"  # null and "auto" suit the stage
NAMES = [
    name
    for name in load_key_table().by_spelling[DEEPSPEED]
    if name.partition(".")[0] in SECTIONS
    and name.count(".")
    and not name.startswith((*_LATER, *_LOSS_SCALING, _FILLED))
]
_UNKNOWN = ('"unknown_key": 1',)
_KEYS = load_key_table().by_spelling[DEEPSPEED]
_BATCH = '"train_micro_batch_size_per_gpu": 1'
SCALARS = [
    'true', 'false', '"true"', '"True"', '"FALSE"', '"yes"', '"off"', '"t"', '"N"', '"1"', '"0"', '"maybe"', '1', '0',
    '2', '3', '-1', '1.0', '0.0', '2.0', '0.5', '5e8', '1e9', '5e-1', '"5e8"', '"1_000"', '"2.0"', '" 2 "', '"+3"',
    '"0x10"', '"007"', '"0.5"', '".5"', '"1e-1"', '"inf"', '"nan"', '9223372036854775808', '1e30',
    'null', '"null"', '"none"', '"None"', '"cpu"', '"CPU"', '" cpu"', '"nvme"', '"auto"', '"Auto"', '""', '[]', '{}',
    '[1]', '{"a": 1}', '1E3', '-0', '"-0"', '"true "', '"/nvme"', '"/nvme/"',
]  # fmt: skip
FITTING = {
    "bool": ["true", "false", '"true"', "1", '"auto"'],
    "int": ["1", "2", "5e8", '"4"', "2.0", '"auto"', '"2.0"', "true"],
    "float": ["0.5", "1", '"0.5"', '"auto"', "true"],
    "str": ['"cpu"', '"nvme"', '"none"', '"auto"'],
    "dict": ["{}", "null"],
}
_TYPES = {name: _KEYS[name].type_in(DEEPSPEED) for name in NAMES}
TABLE = [
    {"text": f"{text[:-1]}, {_BATCH}}}", "names": names}
    for text, names in (
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', ["zero_optimization.stage"]),
        ('{"zero_optimization": {"stage": "auto"}}', ["zero_optimization.stage"]),
        ('{"zero_optimization": {"stage": 3.0}}', ["zero_optimization.stage"]),
        ('{"zero_optimization": {"stage": true}}', ["zero_optimization.stage"]),
        ('{"zero_optimization": true}', ["zero_optimization.stage"]),
        ('{"bf16": {"enabled": "false"}}', ["bf16.enabled"]),
        ('{"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}', ["zero_optimization.sub_group_size"]),
    )
]


def question(random: Random) -> dict[str, Any]:
    """Return a file, and the names that it sets."""
    tree: dict[str, Any] = {}
    names = random.sample(NAMES, random.randint(1, 5))
    if random.random() < 0.7:
        names.append("zero_optimization.stage")
    names = list(
        {_KEYS[name].name.replace("_fp16_", "_16bit_"): name for name in names}.values()
    )  # one key each
    for name in names:
        odd = random.random() < (0.3 if len(names) < 4 else 0.1)
        value = random.choice(SCALARS if odd else FITTING[_TYPES[name]])
        if name.endswith("stage") and not odd:
            value = random.choice(["0", "1", "2", "3", "3"])
        section = tree
        for part in name.split(".")[:-1]:
            held = section.get(part)
            section[part] = section = held if isinstance(held, dict) else {}
        if not isinstance(section.get(name.rpartition(".")[2]), dict):
            section[name.rpartition(".")[2]] = value
    tree["train_micro_batch_size_per_gpu"] = "1"
    return {"text": _text(tree, random), "names": sorted(set(names))}


def _text(tree: dict[str, Any], random: Random, more: tuple[str, ...] = ()) -> str:
    """Return the object as JSON, at times with a key twice, or below the top with one that nobody knows."""
    lines = [
        f"{json.dumps(name)}: {_text(value, random, _UNKNOWN) if isinstance(value, dict) else value}"
        for name, value in tree.items()
    ]
    if random.random() < 0.03:
        lines.append(random.choice([*lines, *more]))
    return "{" + ", ".join(lines) + "}"


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the names, or raise the refusals that the rules state."""
    config = read_text(asked["text"], "ds_config.json", framework=DEEPSPEED)
    found = lint(config, versions={DEEPSPEED: release}).findings
    refused = [each.rule for each in found if each.severity is Severity.ERROR and each.rule in _raising()]
    if refused:
        raise ValueError(str(refused))
    held = believed_of(config, asked["names"])
    return {name: _default(name, release) if value == "auto" else value for name, value in held.items()}


def _default(name: str, release: str) -> object:
    """Return the key's value for rules if the section drops `"auto"`."""
    return default(_KEYS[name], DEEPSPEED, {DEEPSPEED: release})


def _raising() -> set[str]:
    return {rule.id for rule in load_rules() if rule.effect == "raises" and DEEPSPEED in rule.dialects}


def agree(real: Answer, mine: Answer) -> bool:
    """Return whether both refuse, or each value set here is the one in the release's classes.

    A null or empty section is not compared with the release's own values, nor `"auto"` of an unknown key.
    """
    if "value" in real and "value" in mine:
        both = {name for name, _ in mine["value"]["map"]} & {name for name, _ in real["value"]["map"]}
        both = {name for name in both if _TYPES[name] != "dict"}
        real, mine = (
            {
                "value": {
                    "map": [[name, _plain(value)] for name, value in each["value"]["map"] if name in both]
                }
            }
            for each in (real, mine)
        )
    return same_values(real, mine)


def _plain(value: Any) -> Any:
    """Return a path as text; that of the working folder is `.` there."""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    return value.rstrip("/").removeprefix(".") if isinstance(value, str) else value
