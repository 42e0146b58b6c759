# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM as a dialect: launch scripts, argument strings, test and recipe YAML, `--yaml-cfg` files."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.base import NONE, Evidence, flags_in
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.core import MegatronCore, own_fields, shown

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.patch import Patch

_SECTIONS = ("MODEL_ARGS", "ARGS", "model_parallel")
_PROGRAM = r"\bpretrain_\w+\.py|\btrain_rl\.py"
_ENOUGH = 2
_ENOUGH_OWN = 1.5  # flags that only it has, times the share of its flags among all


class MegatronLM(MegatronCore):
    """Megatron-LM. Everything comes down to flags; a field that no flag sets has its default."""

    name = LM
    label = "Megatron-LM"
    package = "megatron/training"
    form = "as flags"
    example_file = "run.sh"
    takes_new_keys = False
    looks_for = "its flags"
    marks = (
        *(f"{section}:" for section in _SECTIONS),
        "parallel_size",
        "train_iters",
        "recompute",
        "moe_",
        "offload",
    )
    shell_marks: tuple[str, ...] = ("--",)

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its flags in a script: its program, or several that only it has; flags alone need be no more.

        A script whose flags are mostly foreign is another framework's: the more it has, the more of its own it needs.
        """
        flags = flags_in(text)
        known = flags & load_vocabulary(LM).names
        if not known or 2 * len(known) < len(flags):
            return NONE
        program, own = re.search(_PROGRAM, text), own_fields(known)
        alone = text.lstrip().startswith("--") and (own or len(known) >= _ENOUGH)
        if program or len(own) * len(known) >= _ENOUGH_OWN * len(flags) or alone:
            return Evidence(
                len(known), proof=shown([*([program[0]] if program else []), *(own or sorted(known))])
            )
        return NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for its flags below MODEL_ARGS or as keys; a flat recipe has fields that are flags without dashes."""
        flags = load_vocabulary(LM).names
        for section in _SECTIONS:
            inside = entries[section].value if section in entries else None
            fields = list(inside) if isinstance(inside, dict) else []
            known = (
                [name for name in fields if _flag(name) in flags] if section.isupper() else own_fields(fields)
            )
            if known:
                return Evidence(1000, certain=section.isupper(), proof=f"{section} with {shown(known)}")
        known = [name for name in entries if _flag(name) in flags]
        own = own_fields(known)
        is_recipe = own and len(known) > _ENOUGH and 5 * len(known) >= 4 * len(entries)
        return Evidence(len(known), proof=shown(own)) if is_recipe else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides, each a string of arguments."""
        from skill_tools.dialects.megatron.lm_compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A flag cut short is refused like any unknown one, but it has a remedy of its own."""
        abbreviates = any(name.startswith(unknown.written) for name in unknown.nearest)
        return "mlm-no-abbrev" if abbreviates else "unknown-key"

    def rule_for_type(self, key: Key | None) -> str:
        """A switch takes no value at all."""
        return "mlm-bool-value" if key is not None and key.type_in(LM) == "bool" else "wrong-type"

    def size_override(self, *keys: str) -> str:
        """Return the flags that give sizes."""
        flags = " ".join(f"{_flag(self.spelling(key))} N" for key in keys)
        return f'--overrides="{flags}"'

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return the flags to add, and as text the line that names those to remove, `dead` ones among them.

        A key that no flag sets is left out: `cpu_offloading`, which follows from its layer count.
        """
        from skill_tools.dialects.patch import Patch, exports

        line, own = exports(settings)
        add, remove = [], dict.fromkeys(dead)
        for key, value in own.items():
            flag = self.spelling(key)
            if not flag.startswith("--"):
                continue
            if not value:
                remove[flag] = None
            elif value is True:
                add.append(flag)
            else:
                add.append(f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}")
        return Patch(self.name, settings, " ".join(add), f"remove {' '.join(remove)}" if remove else "", line)

    def change(self, patch: "Patch") -> str:
        """Return all parts: flags to add and flags to remove are two things."""
        return "\n".join(part for part in (patch.environment, patch.overrides, patch.text) if part).rstrip()


def _flag(name: str) -> str:
    return name if name.startswith("--") else f"--{name.replace('_', '-')}"


DIALECT = MegatronLM()
