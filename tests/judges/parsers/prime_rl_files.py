# SPDX-License-Identifier: Apache-2.0
"""TOML files of prime-rl's trainer, and our reader's values of them."""

from random import Random
from typing import Any

from composed import believed_of, same_values

from skill_tools.configs.source import Source
from skill_tools.dialects.prime_rl.compose import compose
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.lint import lint

PRIME_RL = "prime-rl"
FLAGS = ["model.fsdp_cpu_offload", "model.optim_cpu_offload"]
FULL, AC, OFFLOADED = "model.full_offload", "model.ac", "model.ac_offloading"
TYPE, NORM, RUNS = "optim.type", "optim.max_norm", "max_concurrent_runs"
NAMES = [*FLAGS, FULL, TYPE, NORM, RUNS]
_BOOLS = ["true", "false"]
_ANY = [
    '"true"', '"False"', '"yes"', '"on"', '"off"', '"n"', '"1"', "1", "0", "2", "1.0", "0.0", "2.5", '"None"', '"none"',
    '""', '"maybe"', "[true]", "{}", "1_0", '"2"', '"2.0"', '"1e0"', "inf", '" 1"', "-1", "true", '"TRUE"', '"t"',
]  # fmt: skip
_FITTING = {
    FULL: [
        "true", "false", "{}", "{numa_bind = false}", '{cpu_optimizer_backend = "torch"}', '"None"', "{numa_bnd = 1}",
    ],
    AC: ["{}", "{freq = 1}", "{freq = 0}", '{mode = "full"}', '{mode = "x"}', '"None"', '{freq = "2"}'],
    OFFLOADED: [
        "{}", "{pin_memory = false}", "{max_inflight_activations = 0}", "{max_inflight_activations = 2}", '"None"',
    ],
    TYPE: ['"adamw"', '"muon"', '"sgd"', '"sign_sgd"', '"AdamW"'],
    NORM: ["1.0", "1", '"None"', '"1.0"', "-1.0", "0"],
    RUNS: ["1", "2", "0", '"2"', "2.0"],
}  # fmt: skip
_SECTIONS = ["trainer.model", "trainer.optim", "trainer"]
TABLE: list[dict[str, Any]] = [
    {"texts": [f"[orchestrator]\nbatch_size = 8\n[trainer.model]\n{line}\n"]}
    for line in (
        "fsdp_cpu_offload = true", 'fsdp_cpu_offload = "yes"', "fsdp_cpu_offload = 1", "fsdp_cpu_offload = 2",
        'optim_cpu_offload = "None"', "full_offload = {}", "full_offload = 1", "fsdp_cpu_ofload = true",
        "ac_offloading = true", "[trainer.model.ac_offloading]",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return one or two files, a later one over an earlier one."""
    return {"texts": [_text(random) for _ in range(random.choice([1, 1, 2]))]}


def _text(random: Random) -> str:
    lines = {section: [] for section in _SECTIONS}
    for name in random.sample([*NAMES, AC, OFFLOADED], random.randint(1, 4)):
        section, _, field = f"trainer.{name}".rpartition(".")
        values = _BOOLS if name in FLAGS else _FITTING[name]
        value = random.choice(values if random.random() < 0.85 else _ANY)
        if random.random() < 0.02 and section != "trainer":  # whose other fields are not read
            field = field.replace("o", "oo", 1)
        lines[section].append(f"{field} = {value}")
    tables = [section for section in _SECTIONS if lines[section]]
    random.shuffle(tables)
    if random.random() < 0.2:  # all in the first table, by dotted names
        dotted = [
            f"{section}.{line}".removeprefix("trainer.") for section in tables for line in lines[section]
        ]
        return "\n".join(["[orchestrator]", "batch_size = 8", "[trainer]", *dotted, ""])
    parts = ["[orchestrator]", "batch_size = 8"]
    for section in tables:
        parts += [f"[{section}]", *lines[section]]
    return "\n".join([*parts, ""])


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the set names, or raise the rules' refusals."""
    config = compose(
        [Source(f"{position}.toml", text, None) for position, text in enumerate(asked["texts"])], []
    )
    found = {each.rule for each in lint(config, versions={PRIME_RL: release}).findings}
    if found & _RAISING or config.wrong_types:
        raise ValueError(str([*found, *config.wrong_types])[:200])
    values = believed_of(config, NAMES)
    if "pr-full-clip" in found:
        values[NORM] = None
    return {name: value for name, value in values.items() if name != FULL or value is not None}


_RAISING = {rule.id for rule in load_rules() if rule.effect == "raises" and PRIME_RL in rule.dialects}


def agree(real: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Return whether both refuse, or each set name has the class's value."""
    if "value" in real and "value" in mine:
        names = {name for name, _ in mine["value"]["map"]}
        real = {"value": {"map": [each for each in real["value"]["map"] if each[0] in names]}}
    return same_values(real, mine)
