# SPDX-License-Identifier: Apache-2.0
"""ms-swift as a dialect: arguments of its two programs, the files that they name, FSDP files of its own form."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.deepspeed import EMBEDDED
from skill_tools.dialects.ms_swift import MS_SWIFT

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

_COMMAND = (
    r"(?:^|[\s;&|\"'(])(?:swift|megatron)\s+(?:sft|pt|rlhf)\b|\bswift/cli/(?:_megatron/)?(?:sft|pt|rlhf)\.py"
)
_TRAINING = frozenset({"tuner_type", "train_type", "rlhf_type"})
_PROOF = Evidence(1, certain=True, proof="a command or the arguments of ms-swift")


class MsSwift(Dialect):
    """ms-swift. A field that no argument sets has the default of its argument classes."""

    name = MS_SWIFT
    label = "ms-swift"
    package = "swift"
    no_plan = "the GPU memory of ms-swift's trainers and rollout engines is not modelled"
    adapter = (
        'for swift sft, cpu_offloading.integrations.transformers.offload(self.trainer, "plan.json") in the plugin '
        "file of docs/trainers.md, named by --external_plugins offload_swift.py --optimizer offload"
    )
    embeds = EMBEDDED
    looks_for = "swift or megatron with sft, pt or rlhf; tuner_type or rlhf_type beside model and dataset"
    marks = ("tuner_type", "train_type", "rlhf_type", "fsdp_config")
    shell_marks = ("swift", "megatron")
    example_file = "run.sh"
    form = "as arguments"
    language = "text"
    assigns = " "
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its two commands."""
        return _PROOF if ("swift" in text or "megatron" in text) and re.search(_COMMAND, text) else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a training type beside a model and a dataset, or an FSDP file in its own form."""
        names = entries.keys()
        if names & _TRAINING and {"model", "dataset"} <= names:
            return _PROOF
        section = entries.get("fsdp_config")
        is_file = {name for name in names if not name.startswith("_")} == {"fsdp", "fsdp_config"}
        return _PROOF if is_file and section is not None and isinstance(section.value, dict) else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files and scripts, then arguments on top."""
        from skill_tools.dialects.ms_swift.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """An argument that is left over ends the run."""
        return "sw-unknown-key"


DIALECT = MsSwift()
