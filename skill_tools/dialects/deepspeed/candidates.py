# SPDX-License-Identifier: Apache-2.0
"""The tensors that a DeepSpeed section may keep on the CPU at its stage, for all trainers with such a section.

Apart because a plan of a run without DeepSpeed needs none of it. A file that is not here stays as it is.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects.candidates import OPTIMIZER, OPTIMIZER_LABEL, SHARDED
from skill_tools.dialects.deepspeed import DEEPSPEED
from skill_tools.dialects.deepspeed.mode import is_used, stage
from skill_tools.dialects.run import Mode, OptimizerEngine
from skill_tools.dialects.sharding import Part

_DEVICE = f"{DEEPSPEED}.zero_optimization.offload_{{}}.device"
_RATIO = f"{DEEPSPEED}.zero_optimization.offload_optimizer.ratio"


def weights(config: Config, mode: Mode) -> Iterator[Part]:
    """Yield the section's modes; `mode` is the unchanged run, the only one for an unknown section."""
    by_deepspeed: dict[str, object] = {"optimizer_engine": OptimizerEngine.CPU_ADAM, "pins": mode.pins}
    level = stage(config) if is_used(config) else None
    if not level:
        yield Part(
            {
                "offload_parameters": mode.offload_parameters,
                "optimizer_fraction": mode.optimizer_fraction,
                "optimizer_engine": mode.optimizer_engine,
            }
        )
        return
    optimizer, parameters = _DEVICE.format("optimizer"), _DEVICE.format("param")
    off: dict[str, object] = {key: "none" for key in (optimizer, parameters) if config.value(key) is not None}
    if level != 3 and isinstance(config.value(_RATIO), int | float):  # below 1 it is stage 3's alone
        off[_RATIO] = 1.0
    yield Part(by_deepspeed, settings=off)
    share = mode.optimizer_fraction or 1.0  # the `ratio` of stage 3 stays as it is
    kept = {key: value for key, value in off.items() if key != optimizer}
    yield Part(
        {**by_deepspeed, "optimizer_fraction": share},
        f"{OPTIMIZER_LABEL} {share:.0%}",
        (OPTIMIZER,),
        {optimizer: "cpu", **kept},
    )
    if level == 3:
        yield Part(
            {**by_deepspeed, "offload_parameters": True},
            "parameters and optimizer on the CPU",
            (SHARDED,),
            {optimizer: "cpu", parameters: "cpu"},
        )
