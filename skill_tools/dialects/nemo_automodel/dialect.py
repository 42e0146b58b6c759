# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel as a dialect: the YAML that `automodel` runs; only its strategy's section is read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.nemo_automodel import NEMO_AUTOMODEL

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

_PACKAGE = "nemo_automodel."


class NemoAutoModel(Dialect):
    """NeMo AutoModel. Only FSDP2 offloads parameters, by a policy that has to be a section."""

    name = NEMO_AUTOMODEL
    label = "NeMo AutoModel"
    looks_for = "recipe or step_scheduler beside `_target_: nemo_automodel.…`"
    marks = (_PACKAGE,)
    no_plan = "a recipe's GPU memory follows from the classes that its YAML names"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a recipe, or a schedule of steps, in a file that names a class of the package."""
        if entries.keys().isdisjoint(("recipe", "step_scheduler")):
            return NONE
        pending = list(entries.values())
        while pending:
            value = pending.pop().value
            if isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, str) and value.startswith(_PACKAGE):
                return Evidence(1, certain=True, proof=value)
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files in order, then `--SECTION.NAME=VALUE` on top."""
        from skill_tools.dialects.nemo_automodel.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The strategy's configuration refuses names that it has no field for, and so does the policy's class."""
        is_argument = unknown.written.startswith("distributed.offload_policy.")
        return "am-policy-argument" if is_argument else "am-strategy-option"


DIALECT = NemoAutoModel()
