# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge as a dialect: recipes, YAML overrides, saved runs, dotted overrides, launch programs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Setting, UnknownKey
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.base import NONE, Evidence
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.megatron.core import MegatronCore, own_fields, shown

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.patch import Patch

_SECTIONS = frozenset(
    {
        "checkpoint", "comm_overlap", "dataset", "ddp", "dist", "env_vars", "logger", "mixed_precision", "model",
        "optimizer", "peft", "profiling", "rerun_state_machine", "rng", "scheduler", "tokenizer", "train",
        "validation",
    }
)  # fmt: skip
_SCALARS = ("mixed_precision", "comm_overlap")  # sections that a name may stand for
_WORDS_IN_PYTHON = ("megatron.bridge", "ConfigContainer", "to_megatron_provider")
_IN_PYTHON = (
    r"^[ \t]*(?:from|import) megatron\.bridge\b|-> *\"?(?:\w+\.)*ConfigContainer\b|"
    r"^[^#\"'\n]*\b(?:ConfigContainer|to_megatron_provider)\("
)
# Compiled when there is a script.
_PROGRAM = (
    r"\brun_recipe\.py\b|\bsetup_experiment\.py\b|\bscripts/performance/\w+\.py\b|"
    r"-m megatron\.bridge\.[\w.]*train\w*|\bMegatron-Bridge/scripts/\w+/\w+\.py"
)
_DOTTED = r"(?<![\w.-])[+~]{0,2}([a-z_]+\.[\w.]+)="
_OVERRIDE = r"[+~]{0,2}[a-z_]+\.[\w.]+="
_SET_IN_PYTHON = ("model", "train", "optimizer", "ddp", "comm_overlap")
_ASSIGNED = rf"\b(?:cfg|config|recipe|conf)\.((?:{'|'.join(_SET_IN_PYTHON)})\.\w+)\s*=(?!=)"
_PACKAGE = "megatron.bridge."
_DISTRIBUTED_OPTIMIZER = ("use_distributed_optimizer", "ddp.use_distributed_optimizer")
_V1_OFFLOAD = "env.NVTE_CPU_OFFLOAD_V1"


class MegatronBridge(MegatronCore):
    """Megatron Bridge. An override file is a part of a configuration; the recipe that fills the rest is unseen."""

    name = BRIDGE
    label = "Megatron Bridge"
    package = "megatron/bridge"
    form = "as overrides"
    looks_for = "sections with fields of Megatron Core, a ConfigContainer"
    marks = (
        *(f"{name}:" for name in ("model", "optimizer", "ddp", "train", "comm_overlap")),
        "mixed_precision",
        _PACKAGE,
    )
    shell_marks = (
        "run_recipe.py", "setup_experiment.py", "scripts/performance/", _PACKAGE, "Megatron-Bridge/",
        *sorted(f"{name}." for name in _SECTIONS),
    )  # fmt: skip
    python_marks = (*_WORDS_IN_PYTHON, *(f".{name}." for name in _SET_IN_PYTHON))

    def evidence_in_python(self, text: str) -> Evidence:
        """Look for its package, its ConfigContainer, or fields of its own that are set on a configuration."""
        if any(word in text for word in _WORDS_IN_PYTHON) and (
            found := re.search(_IN_PYTHON, text, re.MULTILINE)
        ):
            return Evidence(20, proof=found[0].strip())
        if not any(f".{section}." in text for section in _SET_IN_PYTHON):
            return NONE
        return self._by_fields(set(re.findall(_ASSIGNED, text)), least=1)

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its launch programs, or for dotted overrides of its fields; overrides alone need be no more."""
        program = re.search(_PROGRAM, text)
        keys = set(re.findall(_DOTTED, text))
        known = [key for key in keys if key.partition(".")[0] in _SECTIONS]
        if program:
            return Evidence(20 * (1 + len(known)), proof=program[0])
        only_overrides = bool(known) and all(map(re.compile(_OVERRIDE).match, text.split()))
        return self._by_fields(set(known), least=0 if only_overrides else 1)

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for the class of a saved run, or for sections of a configuration, and in them fields of its own."""
        target = _target(entries)
        if target:
            return Evidence(60, certain=True, proof=f"_target_: {target}")
        sections = [
            name for name, node in entries.items() if name in _SECTIONS and isinstance(node.value, dict)
        ]
        scalars = [name for name in _SCALARS if name in entries and name not in sections]
        if 2 * len(sections + scalars) < len(entries):
            return NONE
        inside = {name: entries[name].value for name in sections}
        fields = {
            f"{name}.{field}" for name, node in inside.items() if isinstance(node, dict) for field in node
        }
        found = self._by_fields(fields, least=1)
        return found._replace(votes=found.votes + 3 * len(sections)) if found.votes else NONE

    def _by_fields(self, fields: set[str], *, least: int) -> Evidence:
        """Count the fields that it knows; `least` of them must be its own, and most of them known."""
        names = load_vocabulary(BRIDGE)
        known = [name for name in fields if names.accepts(name)]
        own = own_fields(known)
        if not known or len(own) < least or 2 * len(known) < len(fields):
            return NONE
        return Evidence(2 * len(known), proof=shown(own or sorted(known)))

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return each recipe function of a Python file, unless one is asked for, or the script that sets fields."""
        if source.kind is not Kind.PYTHON or source.recipe is not None:
            return (source,)
        from skill_tools.dialects.megatron.python_recipe import recipes

        return recipes(source)

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Merge a recipe, files, overrides and the environment."""
        from skill_tools.dialects.megatron.bridge_compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """An unknown key in a file or after `+` is dropped silently, as an override it ends the run."""
        suffix = PurePath(unknown.place.file).suffix
        if suffix == ".py":
            return "unknown-key"
        skipped = suffix in {".yaml", ".yml"} or unknown.written.startswith("+")
        return "br-dotted-plus-unknown" if skipped else "br-dotted-unknown-key"

    def replaced(self, config: Config) -> Iterator[tuple[str, Setting, Setting]]:
        """Yield values that `mixed_precision`, a distributed optimizer in one section or an exported variable replace.

        A value that a later file, override or line replaced under the same spelling is no such case.
        """
        for loser in {(each.key, each.written): each for each in config.overridden}.values():
            winner = config.settings.get(loser.key)
            if winner is not None and winner.value != loser.value:
                rule = _rule_for_replaced(loser, winner)
                if rule:
                    yield rule, loser, winner

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return dotted overrides beside the YAML that says the same; a `dead` key is refused, whatever its value."""
        present = config.settings if config else {}
        kept = {
            key: value
            for key, value in settings.items()
            if key not in present or present[key].written not in dead
        }
        patch = super().patch(kept, config)
        own = {key: value for key, value in kept.items() if not key.startswith("env.")}
        overrides = (f"{key}={_hydra(value)}" for key, value in self.spelled(own, config).items())
        removal = f"remove {' '.join(dead)}" if dead else ""
        return patch._replace(overrides=" ".join(overrides), removal=removal)

    def change(self, patch: "Patch") -> str:
        """Return the overrides, and below them the keys to remove."""
        return "\n".join(part for part in (super().change(patch), patch.removal) if part)


def _target(entries: "Mapping[str, Node]") -> str:
    """Return the class of the package that a saved run, or one of its sections, was made from."""
    inside = [node.value for node in entries.values() if isinstance(node.value, dict)]
    targets = [each["_target_"].value for each in (entries, *inside) if "_target_" in each]
    return next((name for name in targets if isinstance(name, str) and name.startswith(_PACKAGE)), "")


def _rule_for_replaced(loser: Setting, winner: Setting) -> str:
    if loser.key == _V1_OFFLOAD:
        return "br-env-vars-setdefault" if str(loser.value) == "1" else ""
    if winner.written == loser.written:
        return ""
    if loser.key in _DISTRIBUTED_OPTIMIZER:
        return "oc-distopt-autosync"
    return "oc-mixed-precision-overwrite" if winner.written.startswith("mixed_precision") else ""


def _hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


DIALECT = MegatronBridge()
