# SPDX-License-Identifier: Apache-2.0
"""The dialects by name. A dialect is loaded when it is asked for; all are only if a script has to be recognised."""

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skill_tools import knowledge
from skill_tools.configs.source import Kind
from skill_tools.dialects.base import Dialect

_MODULES = {
    "megatron-bridge": "skill_tools.dialects.megatron.bridge",
    "megatron-lm": "skill_tools.dialects.megatron.lm",
    "mindspeed-llm": "skill_tools.dialects.megatron.mindspeed",
    "axolotl": "skill_tools.dialects.axolotl.dialect",
    "deepspeed": "skill_tools.dialects.deepspeed.dialect",
    "torchtune": "skill_tools.dialects.torchtune.dialect",
    "torchtitan": "skill_tools.dialects.torchtitan.dialect",
    "llama-factory": "skill_tools.dialects.llama_factory.dialect",
    "accelerate": "skill_tools.dialects.accelerate.dialect",
    "ms-swift": "skill_tools.dialects.ms_swift.dialect",
    "verl": "skill_tools.dialects.verl.dialect",
    "nemo-rl": "skill_tools.dialects.nemo_rl.dialect",
    "nemo-automodel": "skill_tools.dialects.nemo_automodel.dialect",
    "prime-rl": "skill_tools.dialects.prime_rl.dialect",
    "slime": "skill_tools.dialects.slime.dialect",
    "miles": "skill_tools.dialects.slime.miles",
    "skyrl": "skill_tools.dialects.skyrl.dialect",
    "areal": "skill_tools.dialects.areal.dialect",
    "openrlhf": "skill_tools.dialects.openrlhf.dialect",
    "musubi-tuner": "skill_tools.dialects.block_swap.musubi",
    "sd-scripts": "skill_tools.dialects.block_swap.sd_scripts",
    "onetrainer": "skill_tools.dialects.block_swap.onetrainer",
    "ai-toolkit": "skill_tools.dialects.block_swap.ai_toolkit",
    "simpletuner": "skill_tools.dialects.block_swap.simpletuner",
    "oumi": "skill_tools.dialects.oumi",
    "maxtext": "skill_tools.dialects.maxtext",
    "roll": "skill_tools.dialects.roll",
    "veomni": "skill_tools.dialects.veomni",
    "xtuner": "skill_tools.dialects.xtuner",
    "lightning": "skill_tools.dialects.lightning.dialect",
    "fsdp1": "skill_tools.dialects.fsdp1.dialect",
    "fsdp2": "skill_tools.dialects.fsdp2.dialect",
    "unsloth": "skill_tools.dialects.unsloth.dialect",
    "transformers": "skill_tools.dialects.transformers.dialect",
}
_SCRIPTS_ALONE = frozenset(
    (
        "mindspeed-llm",
        "lightning",
        "fsdp1",
        "fsdp2",
        "openrlhf",
        "slime",
        "miles",
        "skyrl",
        "unsloth",
        "xtuner",
    )
)  # not loaded to recognise a file with keys
WITHOUT_FILES = "pytorch"  # the subject of a plan where neither a file nor a framework is named
_MODULES_WITHOUT_FILES = {WITHOUT_FILES: "skill_tools.dialects.pytorch.dialect"}

_registered: dict[str, tuple[Dialect, Path]] = {}


def names() -> tuple[str, ...]:
    """Return the name of every dialect, as `--framework` takes it."""
    return (*_MODULES, *_MODULES_WITHOUT_FILES, *_registered)


def named(name: str) -> Dialect:
    """Return the dialect called `name`; raises `KeyError` for a name that is not one of `names()`."""
    return _registered[name][0] if name in _registered else _load(name)


@knowledge.derived
def with_files() -> tuple[Dialect, ...]:
    """Return the dialects with configuration files, in the order of weighing evidence."""
    return (*map(named, _MODULES), *_added())


@knowledge.derived
def with_keyed_files() -> tuple[Dialect, ...]:
    """Return the dialects that may have a YAML, JSON or TOML."""
    return (*(named(name) for name in _MODULES if name not in _SCRIPTS_ALONE), *_added())


def marked_in(text: str, kind: Kind) -> Iterator[Dialect]:
    """Yield the dialects that may have a file of `kind` with this `text`: it has one of their marks.

    The index lists the marks of ours, so that the other dialects, most of them, need not be loaded. A dialect that was
    added without marks may have any file.
    """
    here = {name for mark, names in _by_mark(kind).items() if mark in text for name in names}
    yield from (named(name) for name in _MODULES if name in here)
    for each in _added():
        marks = each.marks_in(kind)
        if not marks or any(mark in text for mark in marks):
            yield each


@knowledge.derived
def _by_mark(kind: Kind) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, marks in knowledge.index()["marks"][kind.value].items():
        for mark in marks:
            found.setdefault(mark, []).append(name)
    return found


def _added() -> Iterator[Dialect]:
    return (dialect for dialect, _ in _registered.values() if dialect.has_files)


def register(dialect: Dialect, data: Path) -> None:
    """Add a framework: its dialect, and its facts in the folder `data` (see `knowledge.add`)."""
    if dialect.name in names():
        raise ValueError(f"{dialect.name} is registered already; expected a name of its own")
    knowledge.add(data)
    _registered[dialect.name] = dialect, data


def unregister(name: str) -> None:
    """Take a registered framework and its facts out again."""
    _, data = _registered.pop(name)
    knowledge.remove(data)


@cache
def _load(name: str) -> Dialect:
    dialect: Dialect = importlib.import_module({**_MODULES, **_MODULES_WITHOUT_FILES}[name]).DIALECT
    return dialect
