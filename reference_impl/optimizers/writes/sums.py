# SPDX-License-Identifier: Apache-2.0
"""Sums of weights: they show a write that neither autograd's counter nor an address does.

Fused kernels, `.data` and a tensor's storage write past the counter. Where a master is in other memory than its weight,
such a write would be undone by the next update. So each weight is added up once it has been written here, and again
before the next update; if both sums differ, other code has written.

Blocks of a weight have a sum each, of 64 bits: any change of one element changes it, and so do elements that change
places or signs. The sums stay on the device, and so does their comparison; the host waits for neither.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from reference_impl.device import Device
from reference_impl.memory.absent import is_away
from reference_impl.memory.arena import HostArena
from reference_impl.memory.ledger import unseen
from reference_impl.memory.readback import Readback

# Bytes of a block; one program of the kernel adds it up.
BLOCK_BYTES = 2**17

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Summed:
    """One weight's rows of a table: `[first, first + rows)`, of bytes that begin at `address`."""

    table: _Table
    index: int
    first: int
    rows: int
    address: int


@dataclass(eq=False, slots=True)
class _Table:
    """Weights that were added together: a row for each block (address, bytes, index of the weight), and its sum."""

    rows: torch.Tensor
    sums: torch.Tensor
    weights: int


class WeightSums(Generic[_Name]):
    """The sums of weights, by a name for each. Its methods queue their work on the live current stream.

    A weight is given flat, contiguous, of 2 or 4 bytes an element, and must keep its length.
    """

    def __init__(self, device: Device, host: HostArena) -> None:
        self._device, self._host = device, host
        self._summed: dict[_Name, _Summed] = {}
        # On the twin, which adds up with torch's operators: an odd number for each element of a block.
        self._factors = torch.empty(0, dtype=torch.int32)

    def add(self, weights: Mapping[_Name, torch.Tensor]) -> None:
        """Make room for the sums of `weights`, and add them up."""
        spans = {
            name: [
                (start, min(BLOCK_BYTES, weight.nbytes - start))
                for start in range(0, weight.nbytes, BLOCK_BYTES)
            ]
            for name, weight in weights.items()
        }
        rows = [
            [weights[name].data_ptr() + start, size, index]
            for index, (name, blocks) in enumerate(spans.items())
            for start, size in blocks
        ]
        if not rows:
            return
        where = self._device.torch_device
        table = _Table(
            torch.tensor(rows, device=where),
            torch.zeros(len(rows), dtype=torch.int64, device=where),
            len(weights),
        )
        found: dict[_Name, _Summed] = {}
        first = 0
        for index, (name, blocks) in enumerate(spans.items()):
            found[name] = _Summed(table, index, first, len(blocks), weights[name].data_ptr())
            first += len(blocks)
        self._summed.update(found)
        self.note(weights)
        # Kernels are built here, and not in the first step.
        self._run(table, range(len(rows)), weights, broken=self._unbroken(table))

    def forget(self, names: Iterable[_Name]) -> None:
        """Drop the sums of `names`, if there are any."""
        for name in names:
            self._summed.pop(name, None)

    def note(self, weights: Mapping[_Name, torch.Tensor]) -> None:
        """Add up `weights` as they are now: later writes are other code's.

        Parked sums stay: a later comparison finds that each element is its master rounded.
        """
        for name, weight in weights.items():
            summed = self._summed.get(name)
            if summed is not None and not is_away(summed.table.rows):
                self._follow_address(summed, weight)
                rows = range(summed.first, summed.first + summed.rows)
                self._run(summed.table, rows, {name: weight}, broken=None)

    def compare(self, weights: Mapping[_Name, torch.Tensor]) -> WrittenWeights[_Name] | None:
        """Compare `weights` with their sums; None if none has any outside of parking.

        Allocates, and raises where memory is short.
        """
        of_tables: dict[_Table, list[_Name]] = {}
        for name in weights:
            summed = self._summed.get(name)
            if summed is not None:
                of_tables.setdefault(summed.table, []).append(name)
        present = {table: names for table, names in of_tables.items() if not is_away(table.rows)}
        if not present:
            return None
        found = []
        for table, names in present.items():
            for name in names:
                self._follow_address(self._summed[name], weights[name])
            broken = self._unbroken(table)
            if len(names) == table.weights:
                self._run(table, range(len(table.rows)), weights, broken=broken)
            else:
                for name in names:
                    summed = self._summed[name]
                    rows = range(summed.first, summed.first + summed.rows)
                    self._run(table, rows, {name: weights[name]}, broken=broken)
            found.append((broken, {self._summed[name].index: name for name in names}))
        return WrittenWeights(self._device, self._host, found)

    def _follow_address(self, summed: _Summed, weight: torch.Tensor) -> None:
        """Use the memory of now: `.data` may have been exchanged."""
        address = weight.data_ptr()
        if address != summed.address:
            rows = summed.table.rows[summed.first : summed.first + summed.rows, 0]
            rows.add_(address - summed.address)
            summed.address = address

    def _unbroken(self, table: _Table) -> torch.Tensor:
        return torch.zeros(table.weights, dtype=torch.int32, device=self._device.torch_device)

    def _run(
        self,
        table: _Table,
        rows: range,
        weights: Mapping[_Name, torch.Tensor],
        *,
        broken: torch.Tensor | None,
    ) -> None:
        """Write the sums of `rows`, or compare with them and mark in `broken` the weights whose sums differ."""
        if self._device.compiles:
            from reference_impl.optimizers.writes.sums_kernel import add_up

            part = slice(rows.start, rows.stop)
            self._device.launch(add_up, table.rows[part], table.sums[part], broken)
            return
        for name, weight in weights.items():
            summed = self._summed[name]
            if summed.table is table:
                sums = table.sums[summed.first : summed.first + summed.rows]
                self._device.launch(self._add_up, weight, sums, broken, summed.index)

    def _add_up(
        self, weight: torch.Tensor, sums: torch.Tensor, broken: torch.Tensor | None, index: int
    ) -> None:
        with unseen():
            found = torch.stack([self._sum(block) for block in weight.split(BLOCK_BYTES // weight.itemsize)])
            if broken is None:
                sums.copy_(found)
            elif not torch.equal(sums, found):
                broken[index] = 1

    def _sum(self, block: torch.Tensor) -> torch.Tensor:
        if not self._factors.numel():
            drawn = torch.randint(
                -(2**31), 2**31, (BLOCK_BYTES // 2,), generator=torch.Generator().manual_seed(0)
            )
            self._factors = (drawn | 1).to(torch.int32)
        bits = block.view(torch.int16 if block.itemsize == 2 else torch.int32)
        return (bits * self._factors[: bits.numel()]).sum(dtype=torch.int64)


class WrittenWeights(Generic[_Name]):
    """The weights written by other code; a copy to the host is on its way.

    Args:
        device, host: the device, and where the copy goes.
        found: for each table the marks of its weights (int32), and the names of the asked ones, by place.
    """

    def __init__(
        self, device: Device, host: HostArena, found: Sequence[tuple[torch.Tensor, Mapping[int, _Name]]]
    ) -> None:
        self._lock = threading.Lock()
        self._written: frozenset[_Name] | None = None
        self._names: dict[int, _Name] = {}
        first = 0
        for broken, names in found:
            self._names.update({first + index: name for index, name in names.items()})
            first += broken.numel()
        self._broken = Readback(device, host, torch.cat([broken for broken, _ in found]))

    def read(self) -> frozenset[_Name]:
        """Wait for the copy; return the weights that were written. Any thread may ask."""
        with self._lock:
            if self._written is None:
                marks = self._broken.read()
                self._written = frozenset(name for index, name in self._names.items() if marks[index])
            return self._written
