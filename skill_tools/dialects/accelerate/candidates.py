# SPDX-License-Identifier: Apache-2.0
"""The candidates of Accelerate's file: FSDP's checkpointing and parameter offload, or DeepSpeed's devices.

The decisions of a named DeepSpeed file stay as they are, and so does the script's treatment of activations.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects.accelerate.run import FSDP, current, sharding_of
from skill_tools.dialects.candidates import (
    INPUTS,
    OPTIMIZER,
    OPTIMIZER_LABEL,
    RECOMPUTE,
    SHARDED,
    Candidate,
    without_recomputation,
)
from skill_tools.dialects.run import ActivationEngine, OptimizerEngine, Recompute, TrainingRun
from skill_tools.dialects.sharding import Part, combined

_FULL, _NONE = Recompute(granularity="full"), Recompute()
_CHECKPOINTING, _OFFLOAD = f"{FSDP}activation_checkpointing", f"{FSDP}activation_checkpointing_offload"
_PARAMETERS = f"{FSDP}offload_params"
_DEVICE = "accelerate.deepspeed_config.{}_device"


def candidates(config: Config, run: TrainingRun) -> Iterator[Candidate]:
    """Yield every way to keep activations, with and without offloading weights or the optimizer."""
    kind = config.value("accelerate.distributed_type")
    if kind == "FSDP":
        return combined(config, _activations(config, run), _fsdp_weights())
    if kind == "DEEPSPEED" and not config.value("accelerate.deepspeed_config.deepspeed_config_file"):
        return combined(config, [Part({})], _deepspeed_weights(config))
    mode = current(config, run)
    weights_as_now = {
        "offload_parameters": mode.offload_parameters,
        "optimizer_fraction": mode.optimizer_fraction,
        "optimizer_engine": mode.optimizer_engine,
    }
    return combined(config, [Part({})], [Part(weights_as_now)])


def _activations(config: Config, run: TrainingRun) -> Iterator[Part]:
    off: dict[str, object] = {_CHECKPOINTING: False, _OFFLOAD: False}
    yield Part({"recompute": _NONE}, without_recomputation(run), (), off)
    on: dict[str, object] = {_CHECKPOINTING: True, _OFFLOAD: False}
    yield Part({"recompute": _FULL}, "FSDP's activation checkpointing", (RECOMPUTE,), on)
    if config.value(f"{FSDP}version", 1) == 2:
        yield Part(
            {"recompute": _FULL, "activation_engine": ActivationEngine.INPUTS},
            "checkpointing with layer inputs offloaded",
            (INPUTS,),
            on | {_OFFLOAD: True},
        )


def _fsdp_weights() -> Iterator[Part]:
    yield Part({}, settings={_PARAMETERS: False})
    yield Part({"offload_parameters": True}, "FSDP parameter offload", (SHARDED,), {_PARAMETERS: True})


def _deepspeed_weights(config: Config) -> Iterator[Part]:
    """Yield the offloads that the stage of the file allows; parameters take stage 3."""
    optimizer, parameters = _DEVICE.format("offload_optimizer"), _DEVICE.format("offload_param")
    none: dict[str, object] = {optimizer: "none", parameters: "none"}
    yield Part({}, settings={key: value for key, value in none.items() if config.value(key) is not None})
    cpu = {"optimizer_fraction": 1.0, "optimizer_engine": OptimizerEngine.CPU_ADAM}
    kept = {parameters: "none"} if config.value(parameters) is not None else {}
    yield Part(cpu, f"{OPTIMIZER_LABEL} 100%", (OPTIMIZER,), {optimizer: "cpu", **kept})
    if sharding_of(config).stage == 3:
        both = {optimizer: "cpu", parameters: "cpu"}
        yield Part({"offload_parameters": True}, "parameters and optimizer on the CPU", (SHARDED,), both)
