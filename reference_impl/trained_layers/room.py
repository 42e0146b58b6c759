# SPDX-License-Identifier: Apache-2.0
"""The host memory that streamed trained layers need, item by item, checked before anything is moved.

Explained in docs/larger-than-gpu.md, "Bytes".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offload_arithmetic.states import state_bytes
from reference_impl.distributed.host_room import HostNeed, require_room
from reference_impl.distributed.mesh import local_of
from reference_impl.distributed.ranks import RankGroup
from reference_impl.memory.shown import Report, size
from reference_impl.optimizers.options import STATES, Streaming
from reference_impl.optimizers.state_offload_wrapped import Wrapped
from reference_impl.optimizers.streamed.storage import StateFormat
from reference_impl.trained_layers.shares import NOTHING_STAYS, StateShares
from reference_impl.weights.storages import BlockStorage, layout


@dataclass(frozen=True, kw_only=True)
class HostBytes(Report):
    """Bytes on the host: `weights` of the blocks, `gradients` and `states` of all trained parameters."""

    weights: int
    gradients: int
    states: int

    def _facts(self) -> Mapping[str, str]:
        return {each: size(getattr(self, each)) for each in ("weights", "gradients", "states")}

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.states


def host_bytes(
    storages: Sequence[Sequence[BlockStorage]],
    params: Iterable[torch.Tensor],
    wrapped: Wrapped,
    state_format: StateFormat,
    *,
    gradients_leave: bool = True,
    shares: StateShares = NOTHING_STAYS,
) -> HostBytes:
    """Return the bytes of `storages` of blocks and of this rank's part of `params` with states of this format."""
    listed, matrices = list(params), wrapped.matrices_by_param
    states = 0.0
    for param in listed:
        numel = local_of(param).numel()
        formula = matrices.get(param)
        moments = len((formula or wrapped.algorithm).moments)
        each = state_bytes([(1, param.element_size())], moments=moments, streams_as=state_format.form)
        if param in shares.on_cpu:
            states += (each.cpu_host - each.staging) * numel
            continue
        streamed = each.streamed
        if formula is not None:
            streamed = state_format.form.signed_bytes(moments, is_own_master=param.element_size() == 4)
        states += streamed * (numel - shares.staying.get(param, 0))
    return HostBytes(
        weights=sum(layout(block)[1] for block in storages),
        gradients=sum(local_of(param).nbytes for param in listed) if gradients_leave else 0,
        states=round(states),
    )


def check_room(
    needed: HostBytes,
    storages: Sequence[Sequence[BlockStorage]],
    streaming: Streaming,
    ranks: RankGroup | None = None,
) -> None:
    """Raise HostMemoryError, with each item, unless the hosts have the bytes needed by each of `ranks`.

    The weights of blocks that are on the host already are let go of one by one. All ranks have to call it.
    """
    choices = [
        f"Streaming(states={states!r}), {size} bytes a bf16 parameter"
        for states, size in (("bf16-moments", 6), ("compact-8", 3.1))
        if STATES.index(states) > STATES.index(streaming.states)
    ]
    choices.append("freezing some layers" if ranks is None else "more hosts")
    require_room(
        HostNeed(
            items={
                "weights of blocks": needed.weights,
                "gradients": needed.gradients,
                "masters and moments": needed.states,
            },
            freed_bytes=sum(s.size_bytes for block in storages for s in block if s.device.type == "cpu"),
        ),
        ranks,
        remedy=lambda fits: f"try {', or '.join(choices)}",
    )
