"""Axolotl as a dialect: one YAML with everything in it, a DeepSpeed file that it may name, options on top."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.axolotl import AXOLOTL
from skill_tools.dialects.base import Dialect, Evidence
from skill_tools.dialects.deepspeed import EMBEDDED

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.run import Mode, Run
    from skill_tools.dialects.shapes import ModelShape

_COMMAND = r"\baxolotl (?:train|preprocess)\b|axolotl\.cli"  # compiled when there is a script
_FLAG = r"(?<![\w-])--[a-z][\w-]+"
_DECISIVE = 1000


class Axolotl(Dialect):
    """Axolotl. A key that it does not know is dropped silently; what its YAML does not say has a default."""

    name = AXOLOTL
    label = "Axolotl"
    embeds = EMBEDDED
    to_fit = "more GPUs (--gpus) that share the weights (fsdp_config, or DeepSpeed ZeRO-3), or a shorter sequence_len"

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its command, and count its options; those that Megatron-LM has too say nothing."""
        flags = set(re.findall(_FLAG, text)) - load_vocabulary("megatron-lm").names
        names = load_vocabulary(AXOLOTL).names
        own = sum(flag[2:].replace("-", "_") in names for flag in flags)
        return Evidence(own + _DECISIVE * bool(re.search(_COMMAND, text)))

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Count its keys."""
        own = load_vocabulary(AXOLOTL).names
        return Evidence(sum(name in own for name in entries) + _DECISIVE * ("base_model" in entries))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides, then the DeepSpeed file that the result names."""
        from skill_tools.dialects.axolotl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Any key that it does not know is dropped."""
        return "ax-typo-silent"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "Run":
        """Return the run that the YAML describes."""
        from skill_tools.dialects.axolotl.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "Run") -> "Mode":
        """Return the mode that the YAML asks for as it stands."""
        from skill_tools.dialects.axolotl.run import current

        return current(config, run)

    def candidates(self, config: Config, run: "Run", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations, with and without offloading weights."""
        from skill_tools.dialects.axolotl.candidates import candidates

        return candidates(config, run)


DIALECT = Axolotl()
