"""Where states live between steps: chunks in pinned host memory, reserved at once, or on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.optimizers.chunks import MASTER, Chunk, Part, plan_chunks
from reference_impl.optimizers.layout import ALIGNMENT, Member


class Homes:
    """Makes chunks of at most `chunk_bytes` of the states `moments` and, with `offload_masters`, the masters."""

    def __init__(
        self,
        device: Device,
        *,
        moments: tuple[str, ...],
        chunk_bytes: int,
        offload_masters: bool,
        remedy: str,
    ) -> None:
        """Take nothing yet."""
        self._device = device
        self._moments = moments
        self._chunk_bytes = chunk_bytes
        self._offload_masters = offload_masters
        self._arena = HostArena(device, remedy=remedy)

    def elements(self, param: torch.Tensor) -> int:
        """Return how many elements of a parameter like `param` a chunk holds at most."""
        return self._chunk_bytes // (4 * len(self._names(param))) // ALIGNMENT * ALIGNMENT

    def make(self, parts: Mapping[Member, Part]) -> list[Chunk]:
        """Return the chunks of members, all states zero. Raises HostMemoryError."""
        resident = {member: part.resident for member, part in parts.items()}
        streamed = {member: part.streamed for member, part in parts.items()}
        return [*self._make(resident, resident=True), *self._make(streamed, resident=False)]

    def close(self) -> None:
        """Wait for all copies and unlock the host memory."""
        self._arena.close()

    def _names(self, param: torch.Tensor) -> tuple[str, ...]:
        """Return the states that travel; an fp32 parameter is its own master."""
        master = (MASTER,) if self._offload_masters and param.dtype != torch.float32 else ()
        return (*master, *self._moments)

    def _make(self, ranges: Mapping[Member, range], *, resident: bool) -> Iterator[Chunk]:
        plans = plan_chunks(ranges, elements=lambda member: self.elements(member.param))
        named = [(*plan, self._names(plan[0][0].member.param)) for plan in plans]
        if named and not resident:
            self._arena.reserve(sum(4 * numel * len(names) for _, numel, names in named))
        for pieces, numel, names in named:
            is_own = pieces[0].member.param.dtype == torch.float32
            size = numel * len(names)
            yield Chunk(
                pieces,
                numel,
                names,
                home=self._on_device(size) if resident else self._on_host(size),
                masters=None if MASTER in names or is_own else self._on_device(numel),
                resident=resident,
            )

    def _on_device(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, device=self._device.torch_device)

    def _on_host(self, numel: int) -> torch.Tensor:
        """Return part of the slab, which is zeros as long as nothing has come back to it."""
        return self._arena.allocate(4 * numel).view(torch.float32, (numel,))
