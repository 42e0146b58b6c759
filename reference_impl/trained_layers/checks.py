# SPDX-License-Identifier: Apache-2.0
"""Refusals that the streamers of this room have in common, before anything is moved.

Explained in docs/larger-than-gpu.md. Apart because both streamers check it.
"""

from __future__ import annotations

from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers.checks import check_no_embeddings
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.owners import check_untrained
from reference_impl.optimizers.state_offload_wrapped import Wrapped
from reference_impl.optimizers.streamed.storage import StateFormat


def check_streaming(streaming: Streaming, wrapped: Wrapped, device: Device) -> StateFormat:
    """Return the format of streamed states. Raises ValueError for a form that is not possible."""
    if streaming.prefetch_bytes:
        raise ValueError(
            f"prefetch_bytes is {streaming.prefetch_bytes}; expected 0, because states come in with their gradients, "
            "after backward; try leaving it out"
        )
    state_format = StateFormat.of(streaming.states, wrapped.algorithm, device)
    state_format.check(wrapped.algorithm, chunk_bytes=streaming.chunk_bytes)
    if any(wrapped.matrices):
        state_format.of_matrices()
    return state_format


def check_params(model: nn.Module, wrapped: Wrapped) -> None:
    """Raise ValueError unless the optimizers train the parameters that the model trains, and no others do.

    So it does where a formula of matrices is given the table of an embedding.
    """
    grouped = {param for group in wrapped.groups for param in group["params"]}
    check_untrained(grouped)
    for name, param in model.named_parameters():
        if param.requires_grad and param not in grouped:
            raise ValueError(
                f"{name} requires a gradient and is in no group of the optimizer; expected every trained parameter "
                f"there; try adding it, or {name}.requires_grad_(False)"
            )
    params_of_model = set(model.parameters())
    for param in grouped:
        if param not in params_of_model:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model has not; expected the "
                "model's own; try making the optimizer from model.parameters()"
            )
    check_no_embeddings(model, wrapped.matrices_by_param)
