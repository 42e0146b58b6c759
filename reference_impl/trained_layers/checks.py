"""What the streamers of this room refuse alike, before anything is moved.

Explained in docs/larger-than-gpu.md. Apart because both streamers check it.
"""

from __future__ import annotations

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.hosted import check_untrained
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.streamed.storage import StateFormat


def check_streaming(streaming: Streaming, algorithm: Algorithm, device: Device) -> StateFormat:
    """Return the format of streamed states. Raises ValueError for a form that is not possible."""
    if streaming.prefetch_bytes:
        raise ValueError(
            f"prefetch_bytes is {streaming.prefetch_bytes}; expected 0, because states come in with their gradients, "
            "after backward; try leaving it out"
        )
    state_format = StateFormat.of(streaming.states, algorithm, device)
    state_format.check(algorithm, chunk_bytes=streaming.chunk_bytes)
    return state_format


def check_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimizer trains what the model trains, and no other does."""
    grouped = {param for group in optimizer.param_groups for param in group["params"]}
    check_untrained(grouped)
    for name, param in model.named_parameters():
        if param.requires_grad and param not in grouped:
            raise ValueError(
                f"{name} requires a gradient and is in no group of the optimizer; expected every trained parameter "
                f"there; try adding it, or {name}.requires_grad_(False)"
            )
    held = set(model.parameters())
    for param in grouped:
        if param not in held:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model has not; expected the "
                "model's own; try making the optimizer from model.parameters()"
            )
