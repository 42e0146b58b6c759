# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-LLM as a dialect: the command of its Megatron trainers, with MindSpeed's options beside Megatron-LM's.

MindSpeed puts its own code into Megatron-LM for NPUs; its checks run around Megatron's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Evidence
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.lm import MegatronLM

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

MINDSPEED_LLM = "mindspeed-llm"
_PROGRAM = re.compile(r"(?m)^[^#\n]*\b(posttrain_gpt\.py)\b")
_ITS_MODULES = re.compile(r"(?m)^[^#\n]*\b(mindspeed_llm)\b")
_TRAINS = re.compile(r"\b(?:pretrain_\w+|rlhf_gpt)\.py\b")
_OWN = (
    "--reuse-fp32-param", "--swap-attention", "--swap-optimizer", "--use-fused-rmsnorm", "--use-fused-swiglu",
    "--use-fused-rotary-pos-emb", "--recompute-activation-function", "--use-ascend-mc2", "--smart-swap",
    "--recompute-in-advance", "--recompute-in-bubble",
)  # fmt: skip
_ENOUGH = 2


class MindSpeedLLM(MegatronLM):
    """MindSpeed-LLM. It trains with Megatron-LM, so rules about Megatron's code apply."""

    name = MINDSPEED_LLM
    label = "MindSpeed-LLM"
    package = "mindspeed_llm"
    looks_for = "posttrain_gpt.py, a spec of mindspeed_llm, or two options such as --swap-attention"
    marks = ()
    shell_marks = ("posttrain_gpt.py", "mindspeed_llm", *_OWN)
    no_plan = "MindSpeed-LLM trains on NPUs, whose kernels, links and memory no plan knows"

    def evidence_in_text(self, text: str) -> Evidence:
        """Take its own program or module, or two options that only MindSpeed has."""
        found = _PROGRAM.search(text) or (_TRAINS.search(text) and _ITS_MODULES.search(text))
        if found:
            return Evidence(1, certain=True, proof=found[1])
        own = [name for name in _OWN if name in text and re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
        return Evidence(1, certain=True, proof=", ".join(own[:3])) if len(own) >= _ENOUGH else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """No file of keys is its Megatron trainers'."""
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the command, then options on top."""
        from skill_tools.dialects.megatron.own_options import Program, compose

        program = Program(self.name, "posttrain_gpt.py or pretrain_gpt.py", {}, is_closed=True)
        return compose(program, sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Megatron's parser refuses a flag that neither has."""
        return "msl-unknown-option"

    def spelling(self, key: str) -> str:
        """Return MindSpeed's own option, else Megatron-LM's flag."""
        known = load_keys().get(key)
        return known.spelling.get(self.name, known.spelling.get(LM, key)) if known else key


DIALECT = MindSpeedLLM()
