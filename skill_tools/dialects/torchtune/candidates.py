# SPDX-License-Identifier: Apache-2.0
"""The candidates of torchtune: checkpointing and its offload, FSDP's CPU offload, torchao's CPU optimizer."""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.candidates import (
    INPUTS,
    NO_OFFLOAD,
    RECOMPUTE,
    SHARDED,
    STATES,
    Candidate,
    changed,
    without_recomputation,
)
from skill_tools.dialects.run import ActivationEngine, Mode, OptimizerEngine, Recompute, TrainingRun
from skill_tools.dialects.torchtune.run import CPU_OPTIMIZER, is_sharded

_Part = tuple[dict[str, object], str, tuple[str, ...], dict[str, object]]


def candidates(config: Config, run: TrainingRun) -> Iterator[Candidate]:
    """Yield every way to keep activations, with and without offloading weights or states."""
    for activations in _activations(run):
        for states in _states(config, run):
            labels = [label for label in (activations[1], states[1]) if label]
            yield Candidate(
                Mode(**activations[0] | states[0]),  # type: ignore[arg-type]
                " + ".join(labels) or NO_OFFLOAD,
                (*activations[2], *states[2]),
                changed(config, activations[3] | states[3]),
            )


def _activations(run: TrainingRun) -> Iterator[_Part]:
    checkpointing, offloading = (
        "torchtune.enable_activation_checkpointing",
        "torchtune.enable_activation_offloading",
    )
    full = Recompute(granularity="full")
    yield (
        {"recompute": Recompute()},
        without_recomputation(run),
        (),
        {checkpointing: False, offloading: False},
    )
    settings: dict[str, object] = {checkpointing: True, offloading: False}
    yield {"recompute": full}, "activation checkpointing", (RECOMPUTE,), settings
    yield (
        {"recompute": full, "activation_engine": ActivationEngine.INPUTS},
        "checkpointing with layer inputs offloaded",
        (INPUTS,),
        {checkpointing: True, offloading: True},
    )


def _states(config: Config, run: TrainingRun) -> Iterator[_Part]:
    """Yield the recipe's ways to keep weights and states; a recipe for one device shards nothing."""
    component = fields.text(config, "torchtune.optimizer._component_") or ""
    if component.endswith(f".{CPU_OPTIMIZER}"):
        gradients = bool(fields.flag(config, "torchtune.optimizer.offload_gradients"))
        engine = OptimizerEngine.TORCHAO_GRADIENTS if gradients else OptimizerEngine.TORCHAO
        yield {"optimizer_fraction": 1.0, "optimizer_engine": engine}, "", (), {}
        return
    key = "torchtune.fsdp_cpu_offload"
    yield {}, "", (), {key: False}
    if is_sharded(config):
        yield {"offload_parameters": True}, "FSDP CPU offload", (SHARDED,), {key: True}
    elif run.adapter is None and component.startswith("torch.optim.AdamW"):
        settings: dict[str, object] = {
            "torchtune.optimizer._component_": f"torchao.optim.{CPU_OPTIMIZER}",
            "torchtune.optimizer_in_bwd": False,
            "torchtune.clip_grad_norm": None,
        }
        mode: dict[str, object] = {"optimizer_fraction": 1.0, "optimizer_engine": OptimizerEngine.TORCHAO}
        yield mode, f"optimizer on the CPU ({CPU_OPTIMIZER})", (STATES,), settings
