# SPDX-License-Identifier: Apache-2.0
"""The places of parameters' states, element by element.

A `Placement` divides the members of an optimizer between its `Shares`. `SplitPlacement` follows a split; that of
visiting weights is in `trained_layers.placement`. The streamed share is imported only if something streams, and the
automatic split only if it is asked for. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from offload_arithmetic.states import StateBytes, state_bytes
from offload_arithmetic.update_time import Split
from reference_impl.device import Device
from reference_impl.distributed.fsdp2 import reductions
from reference_impl.distributed.host_room import HostNeed, require_room
from reference_impl.distributed.mesh import any_is_sharded
from reference_impl.distributed.ranks import RankGroup
from reference_impl.optimizers.algorithms import Algorithm, MatrixAlgorithm
from reference_impl.optimizers.layout import Member, local_numel, members_of
from reference_impl.optimizers.options import Options, Streaming
from reference_impl.optimizers.shares import Shares

if TYPE_CHECKING:
    from reference_impl.optimizers.auto_split import MatrixBytes
    from reference_impl.optimizers.streamed.chunks import Part
    from reference_impl.optimizers.streamed.share import StreamedShare


class Placement(Protocol):
    """The places of parameters' states, element by element, and of their weights."""

    def lay_out(
        self,
        params: Sequence[tuple[torch.Tensor, int]],
        *,
        before: Collection[Member],
        matrices: Sequence[MatrixAlgorithm | None],
    ) -> list[Member]:
        """Return members of `params`, each with its group; they come behind `before` in the forward."""

    def parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        """Return the elements of `members` in the streamed share; other members have none there."""

    def check_room(self, shares: Shares, members: Sequence[Member], parts: Mapping[Member, Part]) -> None:
        """Raise HostMemoryError unless the host has the memory for `members`, on all ranks alike."""

    def check_unfrozen(self, params: Iterable[torch.Tensor], model: nn.Module | None) -> None:
        """Raise RuntimeError where `params`, frozen so far, cannot get states any more."""

    def has_loaded(self) -> None:
        """Hear that masters, and weights with them, were written."""


class SplitPlacement:
    """A split of all elements: the forward's first elements stay, the others leave the device.

    Args:
        split: the shares (resident, streamed, CPU).
        ahead: elements that stream first of all, because they come in behind backward.
        offload: instead of the split, selects the parameters that leave as a whole. stays_in_chunks: the streamed share
            has the resident elements, too: in its format, or with masters apart.
        ranks: the process group of one model, if its parameters do not tell.
        option: the argument to reduce if the host has too little memory.
    """

    def __init__(
        self,
        split: Split,
        *,
        ahead: int = 0,
        offload: Callable[[torch.Tensor], bool] | None = None,
        stays_in_chunks: bool = False,
        ranks: ProcessGroup | None = None,
        option: str = "offload_fraction",
    ) -> None:
        self.split = split
        self._ahead, self._offload, self._stays_in_chunks = ahead, offload, stays_in_chunks
        self._ranks, self._option = ranks, option

    def lay_out(
        self,
        params: Sequence[tuple[torch.Tensor, int]],
        *,
        before: Collection[Member],
        matrices: Sequence[MatrixAlgorithm | None],
    ) -> list[Member]:
        """Return members of `params`, each with its group, see `members_of`."""
        return members_of(
            params,
            first_order=len(before),
            fraction=self.split.streamed + self.split.cpu,
            streamed=self.split.streamed_of_offloaded,
            ahead=max(self._ahead - sum(member.streamed for member in before), 0),
            offload=self._offload,
            reductions=reductions(),
            matrices=matrices,
        )

    def parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        """Return the elements of `members` that stream, and of matrices the resident ones, too."""
        found = {
            member: (range(member.resident, member.on_device), member.resident if self._has(member) else 0)
            for member in members
            if member.streamed or self._has(member)
        }
        if not found:
            return {}
        from reference_impl.optimizers.streamed.chunks import Part

        # A parameter updated in part on the CPU is published as one, so its streamed part waits for the CPU.
        return {
            member: Part(streamed, range(resident), is_split=member.on_cpu > 0)
            for member, (streamed, resident) in found.items()
        }

    def _has(self, member: Member) -> bool:
        """Return whether the streamed share has the resident elements of `member`."""
        return self._stays_in_chunks or member.matrices is not None

    def check_room(self, shares: Shares, members: Sequence[Member], parts: Mapping[Member, Part]) -> None:
        """Raise HostMemoryError; it names the part of the states that fits."""
        staging, states = shares.cpu.host_bytes(members)
        items = {"staging of the CPU share": staging, "its masters and moments": states}
        if parts:
            items["streamed states"] = shares.streamed.host_bytes(parts)
        resident = sum(member.resident for member in members)
        leaving = sum(member.streamed + member.on_cpu for member in members)
        share = leaving / max(resident + leaving, 1)
        require_room(
            HostNeed(items={name: size_bytes for name, size_bytes in items.items() if size_bytes}),
            RankGroup.of([member.param for member in members], self._ranks) if members else None,
            remedy=lambda fits: f"try {self._option}={0.9 * fits * share:.2f} or less",
        )

    def check_unfrozen(self, params: Iterable[torch.Tensor], model: nn.Module | None) -> None:
        """Do nothing: states of `params` are made when they get their first gradient."""

    def has_loaded(self) -> None:
        """Do nothing: weights are where their parameters are."""


def placed(
    device: Device,
    algorithm: Algorithm,
    params: Sequence[torch.Tensor],
    *,
    split: tuple[float, float, float] | Literal["auto"],
    options: Options,
    offload: Callable[[torch.Tensor], bool] | None,
    matrices: Mapping[torch.Tensor, MatrixAlgorithm],
    follows_writes: bool,
) -> tuple[SplitPlacement, StreamedShare | None]:
    """Return the placement of `split`, or of the fastest one for `auto`, and the share that streams, empty, if any.

    Raises ValueError and HostMemoryError for options and budgets that cannot be met.

    Args:
        device: where the parameters are.
        algorithm: the formula of elements.
        params: the parameters that the split is chosen for.
        split: the shares (resident, streamed, CPU), or `auto`.
        options: see `Options`.
        offload: instead of the split, selects the parameters that leave as a whole. matrices: the formulas of `params`
            updated in matrices. These stay or stream; the split between streaming and the CPU is for all others.
        follows_writes: see `StreamedShare`.
    """
    ranks = options.budgets.ranks
    if split != "auto" and not split[1] and options.streaming == Streaming() and not matrices:
        return SplitPlacement(Split(*split), offload=offload, ranks=ranks), None
    streamed = _streamed_share(device, algorithm, options.streaming, follows_writes=follows_writes)
    cut = [param for param in params if param not in matrices]
    sizes = [(local_numel(param), param.element_size()) for param in cut]
    each = _state_bytes(sizes, device, algorithm, options.streaming)
    if split == "auto":
        from reference_impl.optimizers.auto_split import fastest_split_here

        split = fastest_split_here(
            sum(numel for numel, _ in sizes),
            each,
            device,
            options.budgets,
            ring_bytes=streamed.ring_bytes(
                members_of(
                    [(param, number) for number, param in enumerate(params)],
                    first_order=0,
                    fraction=1.0,
                    offload=None,
                    matrices=[matrices.get(param) for param in params],
                )
            ),
            matrices=_matrix_bytes(matrices, device, algorithm, options.streaming),
            # The length of a backward decides how much does come in, and is not known yet. Of sharded parameters as
            # much stays on the device.
            hidden_bytes=options.streaming.prefetch_bytes // (1 if any_is_sharded(cut) else 2),
            ranks=RankGroup.of(cut, ranks),
        )
    # So many elements may come in during backward, or stay: the first elements of the next forward.
    ahead = int(options.streaming.prefetch_bytes / max(each.streamed, 1))
    return SplitPlacement(Split(*split), ahead=ahead, offload=offload, ranks=ranks), streamed


def _streamed_share(
    device: Device, algorithm: Algorithm, streaming: Streaming, *, follows_writes: bool
) -> StreamedShare:
    from reference_impl.optimizers.streamed.share import StreamedShare
    from reference_impl.optimizers.streamed.storage import StateFormat

    return StreamedShare(
        device,
        algorithm,
        chunk_bytes=streaming.chunk_bytes,
        prefetch_bytes=streaming.prefetch_bytes,
        state_format=StateFormat.of(streaming.states, algorithm, device),
        follows_writes=follows_writes,
    )


def _state_bytes(
    sizes: Iterable[tuple[int, int]], device: Device, algorithm: Algorithm, streaming: Streaming
) -> StateBytes:
    from reference_impl.optimizers.streamed.storage import StateFormat

    state_format = StateFormat.of(streaming.states, algorithm, device)
    return state_bytes(sizes, moments=len(algorithm.moments), streams_as=state_format.form)


def _matrix_bytes(
    matrices: Mapping[torch.Tensor, MatrixAlgorithm],
    device: Device,
    algorithm: Algorithm,
    streaming: Streaming,
) -> MatrixBytes | None:
    """Return the bytes of parameters updated in matrices, None if there are none."""
    from reference_impl.optimizers.auto_split import MatrixBytes
    from reference_impl.optimizers.streamed.storage import StateFormat

    if not matrices:
        return None
    form = StateFormat.of(streaming.states, algorithm, device).of_matrices().form
    resident = streamed = 0.0
    for param, formula in matrices.items():
        is_own_master, moments = param.element_size() == 4, len(formula.moments)
        numel = local_numel(param)
        resident += numel * (4 * moments + (0 if is_own_master else 4))
        streamed += numel * form.signed_bytes(moments, is_own_master=is_own_master)
    return MatrixBytes(round(resident), round(streamed))
