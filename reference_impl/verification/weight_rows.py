"""The row of `verify` for frozen weights that stream, in LoRA training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from reference_impl.verification.attachments import beside_plain
from reference_impl.verification.mechanisms import Mechanism, Reference, Scale
from reference_impl.weights import FrozenLayerStreamer

_RANK = 8
_PREFETCH = 1


def weight_rows(scale: Scale) -> Iterator[Mechanism]:
    """Yield the row of `FrozenLayerStreamer`."""
    # One sequence a batch: the peak then lies in a block, not in the logits, and weights are much of it.
    workload = replace(scale.workload, lora_rank=_RANK, batch=1)
    with torch.device("meta"):
        block = workload.new_model().layers[0]
    frozen = sum(param.numel() for param in block.parameters() if not param.requires_grad)
    # The block in use and those ahead of it lie on the device.
    away = workload.shape.layers - 1 - _PREFETCH
    yield Mechanism(
        name=f"LoRA, frozen weights of {workload.shape.layers} layers streamed",
        reference=Reference(name="LoRA without offload", workload=workload),
        attach=beside_plain(lambda model: FrozenLayerStreamer(model, prefetch=_PREFETCH)),
        freed_bytes=workload.dtype.itemsize * frozen * away,
        formula=f"{workload.dtype.itemsize} B x {frozen:,} frozen elements x {away} layers that are away",
        same_kernels=True,
    )
