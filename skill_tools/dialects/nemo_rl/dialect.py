# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL as a dialect: a YAML file over its parents, a command line on top."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.nemo_rl import NEMO_RL

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

_ALGORITHMS = frozenset({"grpo", "dpo", "sft", "rm", "ppo", "distillation", "loss_fn"})
_CHILDS = _ALGORITHMS | {"policy", "cluster", "data_plane", "env"}
_BACKENDS = frozenset({"dtensor_cfg", "megatron_cfg"})
_PROGRAM = r"\brun_(?:grpo|dpo|sft|rm|ppo|distillation|vlm)\w*\.py\b"  # compiled when there is a script
_OWN_PROGRAM = r"\bexamples/(?:\w+/)?run_(?:grpo|dpo|sft|rm|ppo|distillation|vlm)\w*\.py\b"
_POLICY = r"(?<![\w.])\+{0,2}policy\.(?:megatron_cfg|dtensor_cfg|generation|model_name)\b"
_PROOF = Evidence(1, certain=True, proof="policy with a backend, or a parent in YAML")


class NemoRL(Dialect):
    """NeMo-RL. Its files hold every key that the code reads; an unread key does no harm."""

    name = NEMO_RL
    label = "NeMo-RL"
    no_plan = "NeMo-RL shares its GPUs between training and a generation engine whose memory no plan counts"
    looks_for = "policy with dtensor_cfg or megatron_cfg, defaults that name a YAML file"
    marks = ("dtensor_cfg", "megatron_cfg", "defaults")
    shell_marks = ("run_", "policy.")

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for one of its programs with a configuration, or an override of its policy."""
        is_run = "--config" in text and "run_" in text and re.search(_OWN_PROGRAM, text)
        is_named = "--config" in text or ("run_" in text and re.search(_PROGRAM, text))
        has_policy = is_named and "policy." in text and re.search(_POLICY, text)
        return _PROOF if is_run or has_policy else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a policy with a backend beside an algorithm, or a section of NeMo-RL's over a parent in YAML."""
        policy = entries.get("policy")
        sections = policy.value if policy is not None else None
        has_backend = isinstance(sections, dict) and bool(sections.keys() & _BACKENDS)
        is_child = _is_file(entries.get("defaults")) and bool(entries.keys() & _CHILDS)
        return _PROOF if (has_backend and entries.keys() & _ALGORITHMS) or is_child else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read parents, files, then the overrides of the command line."""
        from skill_tools.dialects.nemo_rl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Megatron's classes refuse names that are handed to them; nobody asks for any other."""
        from skill_tools.dialects.nemo_rl.compose import goes_to_megatron

        return "nr-megatron-key" if goes_to_megatron(unknown.written.lstrip("+~")) else "nr-unknown-key"


def _is_file(parent: "Node | None") -> bool:
    values = [] if parent is None else parent.value if isinstance(parent.value, list) else [parent]
    texts = [value if isinstance(value, str) else getattr(value, "value", value) for value in values]
    return bool(texts) and all(isinstance(text, str) and text.endswith((".yaml", ".yml")) for text in texts)


DIALECT = NemoRL()
