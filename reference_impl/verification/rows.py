# SPDX-License-Identifier: Apache-2.0
"""The rows of `verify`: how each mechanism is attached, whether its results are bitwise, and which bytes it frees.

A prediction is a formula over the model alone, independent of the mechanism's report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from offload_arithmetic.sizes import LEAST_SLOTS
from offload_arithmetic.states import ADAM_BYTES, FORMS
from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.device import Device
from reference_impl.optimizers import Streaming
from reference_impl.verification.attachments import beside_plain, hybrid, streamed, with_disk
from reference_impl.verification.saved_bytes import saved_bytes
from reference_impl.verification.train import Attach
from reference_impl.verification.workload import Workload
from reference_impl.weights import FrozenLayerStreamer

MAX_GRAD_NORM = 1.0
# Of an offloaded bf16 element as it crosses the link, with the lower half of the master.
_STREAMED_BYTES = round(FORMS["exact"].bytes(2, is_own_master=False))
_RING = f"{LEAST_SLOTS} slots, and gradients, masters and weights of one chunk"
_SPLIT = (0.2, 0.5, 0.3)
_MODULES = ("core_attention", "down")
_LORA_RANK = 8
_PREFETCH = 1


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of one verification: activation storages below `min_bytes` stay, states stream by `chunk_bytes`."""

    workload: Workload
    min_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A run without offload, to compare rows with."""

    name: str
    workload: Workload
    max_grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One row; the device's peak should fall by `freed_bytes`, which `formula` says in words.

    `same_kernels`: every number is computed by the kernels of the run without offload, so the result is bitwise
    the same on every device.
    """

    name: str
    reference: Reference
    attach: Attach
    freed_bytes: int
    formula: str
    same_kernels: bool


# Asks for the peak of a reference, known when a row is attached.
PeakOf = Callable[[Reference], int]


def optimizer_rows(scale: Scale, plain: Reference) -> Iterator[Mechanism]:
    """Yield the rows of `HybridDeviceOptimizer` and `OptimizerStateOffloader`."""
    for fraction in (0.5, 1.0):
        yield _hybrid(plain, fraction)
        yield _hybrid(plain, fraction, attached=True)
    clipped = replace(plain, name="without offload, clipped", max_grad_norm=MAX_GRAD_NORM)
    yield _hybrid(clipped, 1.0, attached=True)
    yield _streamed(scale, plain)
    yield _streamed(scale, clipped)
    yield _three_shares(scale, clipped)


def activation_rows(scale: Scale, plain: Reference, device: Device, peak_of: PeakOf) -> Iterator[Mechanism]:
    """Yield the rows of `ActivationOffloader` and `CheckpointOffloader`."""
    layers = scale.workload.shape.layers
    # Tensors that wait for their copies are part of the peak; here none may.
    options: dict[str, Any] = {"min_bytes": scale.min_bytes, "in_flight_bytes": 0}
    count = partial(saved_bytes, scale.workload, device, min_bytes=scale.min_bytes)
    row = partial(Mechanism, reference=plain, same_kernels=True)
    # Backward needs the last layer at once, so it stays.
    most, everything = count(layers=layers - 1), count(layers=layers)
    yield row(
        name=f"activations of {layers - 1} layers",
        attach=beside_plain(lambda model: ActivationOffloader(model, num_layers=layers - 1, **options)),
        freed_bytes=most,
        formula=_storages(layers - 1),
    )
    yield row(
        name=f"activations of {layers - 1} layers, half on disk",
        attach=with_disk(
            lambda model, disk: ActivationOffloader(
                model, num_layers=layers - 1, host_limit_bytes=most // 2, disk=disk, **options
            ),
            limit_bytes=most,
        ),
        freed_bytes=most,
        formula=_storages(layers - 1),
    )
    yield row(
        name="activations under a budget",
        attach=beside_plain(
            lambda model: ActivationOffloader(
                model, budget_bytes=peak_of(plain) - everything // 2, min_bytes=scale.min_bytes
            )
        ),
        freed_bytes=everything // 2,
        formula="half of the storages that all layers save, as the budget demands",
    )
    yield row(
        name=f"inputs of {' and '.join(_MODULES)}",
        attach=beside_plain(lambda model: ActivationOffloader(model, modules=_MODULES, **options)),
        freed_bytes=count(inputs_of=_MODULES),
        formula="inputs that only these modules save, each once",
    )
    yield row(
        name="recompute, layer inputs offloaded",
        attach=beside_plain(lambda model: CheckpointOffloader(model, **options)),
        freed_bytes=everything,
        formula=_storages(layers),
    )


def weight_rows(scale: Scale) -> Iterator[Mechanism]:
    """Yield the row of `FrozenLayerStreamer`."""
    # One sequence a batch: the peak then lies in a block, not in the logits, and weights are much of it.
    workload = replace(scale.workload, lora_rank=_LORA_RANK, batch=1)
    with torch.device("meta"):
        block = workload.new_model().layers[0]
    frozen = sum(param.numel() for param in block.parameters() if not param.requires_grad)
    # The block in use and the blocks ahead of it lie on the device.
    away = workload.shape.layers - 1 - _PREFETCH
    yield Mechanism(
        name=f"LoRA, frozen weights of {workload.shape.layers} layers streamed",
        reference=Reference(name="LoRA without offload", workload=workload),
        attach=beside_plain(lambda model: FrozenLayerStreamer(model, prefetch=_PREFETCH)),
        freed_bytes=workload.dtype.itemsize * frozen * away,
        formula=f"{workload.dtype.itemsize} B x {frozen:,} frozen elements x {away} layers that are away",
        same_kernels=True,
    )


def _hybrid(reference: Reference, fraction: float, *, attached: bool = False) -> Mechanism:
    offloaded = round(fraction * reference.workload.parameters)
    return Mechanism(
        name=f"optimizer {fraction:.0%}{', attached' * attached}{_clipped(reference)}",
        reference=reference,
        attach=hybrid(offload_fraction=fraction, attached=attached, max_grad_norm=reference.max_grad_norm),
        freed_bytes=ADAM_BYTES * offloaded,
        formula=f"{ADAM_BYTES} B x {offloaded:,} offloaded elements",
        same_kernels=False,
    )


def _streamed(scale: Scale, reference: Reference) -> Mechanism:
    numel = reference.workload.parameters
    return Mechanism(
        name=f"optimizer states streamed, attached{_clipped(reference)}",
        reference=reference,
        attach=streamed(chunk_bytes=scale.chunk_bytes, max_grad_norm=reference.max_grad_norm),
        freed_bytes=ADAM_BYTES * numel - _ring_bytes(scale),
        formula=f"{ADAM_BYTES} B x {numel:,} elements, less {_RING}",
        same_kernels=True,
    )


def _three_shares(scale: Scale, reference: Reference) -> Mechanism:
    leaving = round((1 - _SPLIT[0]) * reference.workload.parameters)
    resident, by_stream, by_cpu = (f"{share:.0%}" for share in _SPLIT)
    return Mechanism(
        name=f"optimizer {resident} resident, {by_stream} streamed, {by_cpu} on the CPU, attached{_clipped(reference)}",
        reference=reference,
        attach=hybrid(
            split=_SPLIT,
            streaming=Streaming(chunk_bytes=scale.chunk_bytes),
            attached=True,
            max_grad_norm=reference.max_grad_norm,
        ),
        freed_bytes=ADAM_BYTES * leaving - _ring_bytes(scale),
        formula=f"{ADAM_BYTES} B x {leaving:,} elements, less {_RING}",
        same_kernels=False,
    )


def _ring_bytes(scale: Scale) -> int:
    # Beside its slot a chunk has gradients and masters in fp32, and its new weights in bf16.
    return LEAST_SLOTS * scale.chunk_bytes + scale.chunk_bytes // _STREAMED_BYTES * (4 + 4 + 2)


def _clipped(reference: Reference) -> str:
    return "" if reference.max_grad_norm is None else ", clipped"


def _storages(layers: int) -> str:
    return f"storages that {layers} layers save, each once"
