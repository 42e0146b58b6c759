# SPDX-License-Identifier: Apache-2.0
"""The common part of Megatron Bridge and Megatron-LM as dialects, because both train with Megatron Core.

It stands alone so that neither dialect's module loads the other.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config
from skill_tools.dialects.base import Dialect

if TYPE_CHECKING:
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

# Parts of the names that only Megatron Core has. `num_layers`, `lr` or `micro_batch_size` are fields of many others.
_OWN_PARTS = (
    "model_parallel", "context_parallel", "sequence_parallel", "expert_parallel", "data_parallel", "pipeline_parallel",
    "recompute_", "cpu_offload", "offload_modules", "offload_fraction", "fine_grained_", "optimizer_offload", "moe_",
    "cuda_graph", "distributed_optimizer", "overlap_", "train_iters", "decay_iters", "warmup_iters", "eval_iters",
    "grad_reduce_in", "precision_aware", "megatron", "_in_fp32", "mtp_", "transformer_engine", "op_fuser", "mcore",
    "exp_avg", "main_grads_dtype", "main_params_dtype", "tp_comm", "wgrad", "_fusion", "store_param_remainders",
    "manual_gc", "hf_model_id", "ckpt_format", "rampup_batch_size",
)  # fmt: skip
_SHOWN = 3


class MegatronCore(Dialect):
    """A dialect of Megatron Core: one way from parallel sizes to a run, one set of candidates."""

    language = "text"
    assigns = "="

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run; raises `UnusableInput` for sizes that cannot be."""
        from skill_tools.dialects.megatron.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the configuration asks for as it stands."""
        from skill_tools.dialects.megatron.candidates import current

        return current(config)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every combination of recompute, activation offload and optimizer offload worth a look."""
        from skill_tools.dialects.megatron.candidates import candidates

        return candidates(config, run, advice)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in a configuration."""
        from skill_tools.dialects.megatron.levers import found

        return found(config, run)

    def remarks(self, config: Config, mode: "Mode") -> tuple[str, ...]:
        """Name tensors that the mode as it stands does not move, although its name promises it."""
        from skill_tools.dialects.megatron.candidates import remarks

        return remarks(config, mode)

    def cautions(self, settings: Mapping[str, object]) -> tuple[str, ...]:
        """Name the changes of a proposal beside memory and time."""
        from skill_tools.dialects.megatron.candidates import cautions

        return cautions(settings)


def own_fields(names: Iterable[str]) -> list[str]:
    """Return those of the fields `names` (`model.x`, `--x-y` or `x_y`) that only Megatron Core calls so, sorted."""
    fields = {name: name.rpartition(".")[2].replace("-", "_") for name in names}
    return sorted(name for name, field in fields.items() if any(part in field for part in _OWN_PARTS))


def shown(names: Iterable[str]) -> str:
    """Return the first few of `names` as proof of an input."""
    return ", ".join(list(names)[:_SHOWN])
