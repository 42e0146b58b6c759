"""slime as a dialect: the command of its train.py, with the scripts that it sources."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.dialects import fields
from skill_tools.dialects.base import NONE, Evidence
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.lm import MegatronLM
from skill_tools.dialects.slime import OWN_OPTIONS, SLIME

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_ENOUGH = 2
_FORK = "miles"  # it has the same options and others, and checks other things


class Slime(MegatronLM):
    """slime. It trains with Megatron-LM, so its runs are planned as such, and rules about Megatron's code apply."""

    name = SLIME
    label = "slime"
    looks_for = "two options such as --rollout-num-gpus, --actor-num-nodes or --colocate"
    package = "slime"
    marks = ()

    def evidence_in_text(self, text: str) -> Evidence:
        """Take two options that no program but slime's train.py has; those of its fork miles are not read."""
        found = [
            name for name in OWN_OPTIONS if name in text and re.search(rf"(?<![\w-]){name}(?![\w-])", text)
        ]
        if len(found) < _ENOUGH or _FORK in text:
            return NONE
        return Evidence(1, certain=True, proof=", ".join(found[:3]))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the command, then options on top."""
        from skill_tools.dialects.slime.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Megatron's parser is told to pass over what it does not know."""
        return "sl-dropped-option"

    def spelling(self, key: str) -> str:
        """Return slime's own option, else Megatron-LM's flag."""
        known = load_keys().get(key)
        return known.spelling.get(SLIME, known.spelling.get(LM, key)) if known else key

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the trainer's run, on the GPUs that its two options give it."""
        nodes, each = (fields.count(config, f"slime.actor_{name}") for name in ("nodes", "gpus"))
        return super().run(config, shape, gpus=gpus or (nodes or 1) * (each or 8))

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """No file of keys is slime's."""
        return NONE

    def remarks(self, config: Config, mode: "Mode") -> tuple[str, ...]:
        """Say what the engines hold while the trainer trains."""
        said = super().remarks(config, mode)
        if not config.value("slime.colocate"):
            return said
        if config.value("slime.offload_rollout") is False:
            share = config.value("slime.sglang_share", "its")
            return (
                *said,
                f"SGLang stays on these GPUs with {share} of their memory, which is not counted here",
            )
        text = "SGLang's weights and KV cache leave these GPUs for the update; what its processes keep is not counted"
        return (*said, text)


DIALECT = Slime()
