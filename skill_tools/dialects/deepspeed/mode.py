# SPDX-License-Identifier: Apache-2.0
"""The mode of a DeepSpeed section, as a plan sees it: stage, sharded tensors, tensors that leave the GPU.

For every dialect that embeds one; nothing here reads another section. A run with `auto` in these fields is the one
that DeepSpeed would make of it, unless the trainer's reader has filled them in.
"""

import math

from skill_tools.configs.config import Config
from skill_tools.dialects import fields, parameters
from skill_tools.dialects.deepspeed import DEEPSPEED
from skill_tools.dialects.run import Mode, OptimizerEngine, TrainingRun

_ZERO = f"{DEEPSPEED}.zero_optimization"
_HOST = ("cpu", "nvme")
_SUB_GROUP = 1_000_000_000


def is_used(config: Config) -> bool:
    """Return whether the configuration has a DeepSpeed section that says anything."""
    return any(config.owner(key) == DEEPSPEED for key in config.settings)


def stage(config: Config) -> int | None:
    """Return the ZeRO stage: 0 nothing, 1 states, 2 and gradients, 3 and weights; None where there is no section."""
    if config.value(f"{_ZERO}.stage") == "auto":
        return 0
    written = fields.integer(config, f"{_ZERO}.stage")
    return written if written is not None or not is_used(config) else 0


def offloads_optimizer(config: Config) -> bool:
    """Return whether states wait, and updates run, on the host; stages 1 and 2 treat NVMe as the host."""
    return _device(config, "offload_optimizer") in _HOST and bool(stage(config))


def offloads_parameters(config: Config) -> bool:
    """Return whether the weights wait on the host, which needs them sharded, at stage 3."""
    return _device(config, "offload_param") in _HOST and stage(config) == 3


def mode(config: Config, run: TrainingRun) -> Mode:
    """Return the tensors that the section moves off the GPU in `run`."""
    pins = bool(fields.flag(config, f"{_ZERO}.offload_optimizer.pin_memory"))
    if offloads_parameters(config):
        return Mode(optimizer_engine=OptimizerEngine.CPU_ADAM, offload_parameters=True, pins=pins)
    share = offloaded_share(config, run) if offloads_optimizer(config) else 0.0
    return Mode(optimizer_engine=OptimizerEngine.CPU_ADAM, optimizer_fraction=share, pins=pins)


def offloaded_share(config: Config, run: TrainingRun) -> float:
    """Return the share of the optimizer states that `ratio` really offloads.

    Stage 3 gives whole sub-groups of a rank's parameters to the CPU (`stage3.py`, `_create_fp32_partitions`).
    """
    ratio = _number(config, "offload_optimizer.ratio", 1.0)
    if ratio >= 1 or stage(config) != 3:
        return 1.0
    trained = run.adapter.parameters if run.adapter else parameters.model(run.shape).total
    grain = max(_number(config, "sub_group_size", _SUB_GROUP), 1)
    groups = max(math.ceil(trained / run.layout.dense_shards / grain), 1)
    return 1 - int((1 - max(ratio, 0.0)) * groups) / groups


def _device(config: Config, section: str) -> str | None:
    return fields.text(config, f"{_ZERO}.{section}.device")


def _number(config: Config, key: str, default: float) -> float:
    """Return a number of zero_optimization; `auto` is its default."""
    if config.value(f"{_ZERO}.{key}") == "auto":
        return default
    written = fields.number(config, f"{_ZERO}.{key}")
    return default if written is None else written
