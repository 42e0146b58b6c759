# SPDX-License-Identifier: Apache-2.0
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
# Of miles, which has the same options and others, and checks other things.
_OF_MILES = re.compile(
    r"miles|--(?:offload-train-(?:target|disk)|offload-rollout-level|stream-optimizer-state|rematerialize-param|fully-async)"
)


class Slime(MegatronLM):
    """slime. It trains with Megatron-LM, so its runs are planned as such, and rules about Megatron's code apply."""

    name = SLIME
    label = "slime"
    looks_for = "two options such as --rollout-num-gpus, --actor-num-nodes or --colocate"
    package = "slime"
    marks = ()
    shell_marks = OWN_OPTIONS
    is_fork = False
    # `_set_default_megatron_args`, and the settings implied by its loaded folder and dist_ckpt_save_pre_mcore_014.
    forced: Mapping[str, object] = {"use_distributed_optimizer": True, "bf16": True}
    decided: tuple[str, ...] = ("load_optim", "finetune", "dist_ckpt_optim_fully_reshardable")

    def evidence_in_text(self, text: str) -> Evidence:
        """Take two options of slime and miles alone, and the sign that distinguishes these two."""
        found = [
            name for name in OWN_OPTIONS if name in text and re.search(rf"(?<![\w-]){name}(?![\w-])", text)
        ]
        if len(found) < _ENOUGH or bool(_OF_MILES.search(text)) is not self.is_fork:
            return NONE
        return Evidence(1, certain=True, proof=", ".join(found[:3]))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read the command, then options on top."""
        from skill_tools.dialects.megatron.own_options import Program, compose

        of_engines, tokens = ("--sglang-", "--router-"), "slime.max_tokens_per_gpu"
        program = Program(
            self.name, f"{self.label}'s train.py", self.forced, self.decided, of_engines, tokens
        )
        return compose(program, sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Megatron's parser is told to pass over unknown flags."""
        return "sl-dropped-option"

    def spelling(self, key: str) -> str:
        """Return its own option, else Megatron-LM's flag."""
        known = load_keys().get(key)
        return known.spelling.get(self.name, known.spelling.get(LM, key)) if known else key

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the trainer's run, on the GPUs that its two options give it."""
        nodes, each = (fields.count(config, f"slime.actor_{name}") for name in ("nodes", "gpus"))
        return super().run(config, shape, gpus=gpus or (nodes or 1) * (each or 8))

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """No file of keys is slime's."""
        return NONE

    def kept_by_engines(self, config: Config) -> float:
        """Return SGLang's share, where it is on the trainer's GPUs and does not leave them for the update."""
        stays = bool(config.value("slime.colocate")) and config.value("slime.offload_rollout") is False
        return (fields.number(config, "slime.sglang_share") or 0.0) if stays else 0.0

    def remarks(self, config: Config, mode: "Mode") -> tuple[str, ...]:
        """Name the memory that the engines hold while the trainer trains."""
        said = super().remarks(config, mode)
        if not config.value("slime.colocate"):
            return said
        if config.value("slime.offload_rollout") is False:
            if share := self.kept_by_engines(config):
                return (
                    *said,
                    f"SGLang stays on these GPUs with {share:.0%} of their memory, which the plan leaves it",
                )
            return (
                *said,
                "SGLang stays on these GPUs with its share of their memory, which is not counted here",
            )
        text = "SGLang's weights and KV cache leave these GPUs for the update; its processes' memory is not counted"
        return (*said, text)


DIALECT = Slime()
