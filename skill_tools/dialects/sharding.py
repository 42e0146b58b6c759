# SPDX-License-Identifier: Apache-2.0
"""How the trainers of Hugging Face's models share a model's weights, gradients and states between GPUs, for a plan.

These trainers spell FSDP and DeepSpeed in several ways; the part of either that a plan needs is here. Sharding is
counted in ZeRO's stages: 0 nothing, 1 states, 2 and gradients, 3 and weights. Hugging Face's bytes per parameter are an
assumption, which the plan states in words.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.candidates import NO_OFFLOAD, Candidate, changed
from skill_tools.dialects.run import Exchange, Mode, Precision, TrainingRun

# Of both moments: by an optimizer's name, first of all its precision, whatever the weights' is.
_STATE_BYTES = (("8bit", 2.0), ("4bit", 1.0), ("32bit", 8.0), ("adafactor", 0.1))
_ONE_MOMENT = ("lion", "sgd", "muon")
# Transformers' names of torch's own AdamW, the one optimizer by name whose place `reference_impl` takes in a trainer.
_TORCHS_ADAMW = ("adamw_torch", "adamw_torch_fused")


class Sharding(NamedTuple):
    """The sharded tensors, and whether DeepSpeed or FSDP shards them."""

    stage: int = 0
    by_deepspeed: bool = False


def world_of(gpus: int | None, stage: int, assumptions: list[Assumption]) -> int:
    """Return how many GPUs train, with an assumption where nobody says."""
    if gpus is not None:
        return gpus
    world = 8 if stage else 1
    why = "one node, because it shards" if stage else "nothing shards it"
    assumptions.append(
        Assumption(f"{world} GPU{'s' if world > 1 else ''} ({why}); say --gpus N for yours", About.GPUS)
    )
    return world


def is_torchs_adamw(optimizer: str) -> bool:
    """Return whether an optimizer of Transformers, by its name, is `torch.optim.AdamW`."""
    return optimizer.lower() in _TORCHS_ADAMW


def precision_of(
    sharding: Sharding, optimizer: str, assumptions: list[Assumption], *, adapted: bool
) -> Precision:
    """Return Hugging Face's bytes a parameter of a bf16 model under mixed precision."""
    name = optimizer.lower()
    small = next((size for part, size in _STATE_BYTES if part in name), None)
    count = 1 if any(part in name for part in _ONE_MOMENT) else 2
    moments = 4.0 * count if small is None else small * count / 2
    if name.startswith("paged"):
        assumptions.append(
            Assumption("paged states count as the GPU's; the driver pages the excess to the host")
        )
    if adapted:
        return Precision(gradient_bytes=2, master_bytes=0, gradient_is_buffer=False)
    if sharding.stage and sharding.by_deepspeed:
        assumptions.append(
            Assumption("bf16 weights and gradients, fp32 masters and states, as DeepSpeed keeps them")
        )
        return Precision(gradient_bytes=2, moments_bytes=moments, gradient_is_buffer=False)
    if sharding.stage:
        assumptions.append(
            Assumption("sharded weights, gradients and states in fp32, computed in bf16 (mixed precision)")
        )
        return Precision(weight_bytes=4, master_bytes=0, moments_bytes=moments, gradient_is_buffer=False)
    assumptions.append(
        Assumption(f"weights, gradients and {optimizer} states in bf16, as Hugging Face trains a bf16 model")
    )
    return Precision(
        gradient_bytes=2,
        master_bytes=0,
        moments_bytes=2.0 * count if small is None else moments,
        gradient_is_buffer=False,
    )


def with_exchange(run: TrainingRun, sharding: Sharding, *, group: int = 0) -> TrainingRun:
    """Return `run` with the copies between its data-parallel ranks; `group` of them share a copy, 0 all.

    FSDP gathers in the dtype that it computes in and reduces in it, as Accelerate's policy has it; without resharding
    it gathers once a micro-batch. ZeRO-1 and -2 gather the updated weights, and wait for them; ZeRO-1 reduces once a
    step. Without shards DDP sends gradients once a step.
    """
    if run.layout.dense_shards == 1:
        return run
    if not sharding.stage:
        sent = Exchange(reduced=run.precision.gradient_bytes, each_batch=False, all_reduces=True)
    elif sharding.stage == 3:
        sent = Exchange(gathered_forward=2, gathered_backward=2, reduced=2, group=group)
    elif sharding.by_deepspeed:
        sent = Exchange(gathered_after_update=2, reduced=2, each_batch=sharding.stage == 2)
    else:
        sent = Exchange(gathered_forward=2, reduced=2, group=group)
    return run._replace(exchange=sent)


class Part(NamedTuple):
    """Half a candidate, its activations or its weights: fields of the mode, label, mechanisms and settings."""

    mode: Mapping[str, object]
    label: str = ""
    mechanisms: tuple[str, ...] = ()
    settings: Mapping[str, object] = {}


def combined(config: Config, activations: Iterable[Part], weights: Iterable[Part]) -> Iterator[Candidate]:
    """Yield a candidate for every way to keep activations with every way to keep weights."""
    ways = list(weights)
    for kept in activations:
        for held in ways:
            mode = Mode(**{**kept.mode, **held.mode})  # type: ignore[arg-type]
            nothing = "as it is" if mode.offload_parameters or mode.optimizer_fraction else NO_OFFLOAD
            yield Candidate(
                mode,
                " + ".join(label for label in (kept.label, held.label) if label) or nothing,
                (*kept.mechanisms, *held.mechanisms),
                changed(config, {**kept.settings, **held.settings}),
            )
