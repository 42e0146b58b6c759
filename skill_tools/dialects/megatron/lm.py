"""Megatron-LM as a dialect: launch scripts, argument strings, test and recipe YAML, `--yaml-cfg` files."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.base import Evidence
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.core import MegatronCore

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.patch import Patch

_SECTIONS = frozenset({"MODEL_ARGS", "ENV_VARS", "ARGS", "language_model", "model_parallel"})
_FLAG = r"(?<![\w-])--[a-z][\w-]+"  # compiled when there is a script


class MegatronLM(MegatronCore):
    """Megatron-LM. Everything comes down to flags; what no flag sets has its default."""

    name = LM
    label = "Megatron-LM"
    form = "as flags"
    example_file = "run.sh"
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Count its flags in a script; one whose flags are mostly foreign is another framework's."""
        flags = set(re.findall(_FLAG, text))
        own = len(flags & load_vocabulary(LM).names)
        return Evidence(own if 2 * own >= len(flags) else 0)

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for its sections, or flags as keys; a flat recipe has fields that are flags without their dashes."""
        if entries.keys() & _SECTIONS or any(name.startswith("--") for name in entries):
            return Evidence(1000, certain=True)
        flags = load_vocabulary(LM).names
        return Evidence(sum(f"--{name.replace('_', '-')}" in flags for name in entries))

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

    def size_override(self, key: str) -> str:
        """Return the flag that gives a size of the model."""
        return f'--overrides="--{key.replace("_", "-")} N"'

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return the flags to add, and as text the line that names those to remove, `dead` ones among them.

        What no flag says is left out: `cpu_offloading`, which follows from its layer count.
        """
        from skill_tools.dialects.patch import Patch, exports

        line, own = exports(settings)
        add, remove = [], list(dead)
        for key, value in own.items():
            flag = self.spelling(key)
            if not flag.startswith("--"):
                continue
            if not value:
                remove.append(flag)
            elif value is True:
                add.append(flag)
            else:
                add.append(f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}")
        return Patch(LM, settings, " ".join(add), f"remove {' '.join(remove)}" if remove else "", line)

    def change(self, patch: "Patch") -> str:
        """Return all parts: flags to add and flags to remove are two things."""
        return "\n".join(part for part in (patch.environment, patch.overrides, patch.text) if part).rstrip()


DIALECT = MegatronLM()
