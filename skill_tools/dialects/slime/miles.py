# SPDX-License-Identifier: Apache-2.0
"""miles as a dialect: the command of its train.py, with the options of slime and Megatron-LM beside its own."""

from collections.abc import Mapping

from skill_tools.configs.config import UnknownKey
from skill_tools.dialects.slime import MILES
from skill_tools.dialects.slime.dialect import Slime


class Miles(Slime):
    """miles. Options that it has of slime have slime's keys; its own checks are about both."""

    name = MILES
    label = "miles"
    package = "miles"
    looks_for = "two options such as --rollout-num-gpus, --actor-num-nodes or --colocate, beside miles's name"
    is_fork = True
    # `set_default_megatron_args`: the optimizer is distributed for Adam, but for adapters and a debug option.
    forced: Mapping[str, object] = {"bf16": True}
    decided = ("load_optim", "finetune", "use_distributed_optimizer")

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Megatron's parser is told to pass over unknown flags."""
        return "mi-dropped-option"


DIALECT = Miles()
