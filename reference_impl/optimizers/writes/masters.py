# SPDX-License-Identifier: Apache-2.0
"""Masters on the device take over weights written by others, counted or not.

Between steps a weight is its master rounded. Where it is not, others have written it: the master becomes the weight,
in this element alone, because all others hold more than their weights do. Weight and master are both here, so they are
compared element by element, and the host neither knows nor waits.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.device import Device
from reference_impl.memory.ledger import unseen

# Elements compared at once by the twin, and by one program of the kernel.
BLOCK_ELEMENTS = 2**14


class DeviceMasters:
    """Compares weights with their masters, on the live current stream; allocates nothing but in `take_over_all`.

    Weights are flat, bf16 or fp16, and masters fp32, as long.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._can_compare = device.has_kernels
        # Of the last call: it is the same in each step.
        self._places: list[tuple[int, int, int]] = []
        self._tables: list[tuple[torch.dtype, torch.Tensor]] = []
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def expect(self, dtype: torch.dtype) -> None:
        """Allocate the scratch of comparing weights of `dtype`, and build its kernel."""
        if not self._can_compare or dtype in self._scratch or dtype == torch.float32:
            return
        if self._device.compiles:
            few = torch.zeros(16, dtype=dtype, device=self._device.torch_device)
            self._scratch[dtype] = (few, few, few)
            self.take_over_all([few], [few.float()])
            self.take_over(few, few.float())
            self._places, self._tables = [], []
            return
        with unseen():
            self._scratch[dtype] = (
                torch.empty(BLOCK_ELEMENTS, dtype=dtype),
                torch.empty(BLOCK_ELEMENTS, dtype=torch.bool),
                torch.empty(BLOCK_ELEMENTS),
            )

    def take_over_all(self, weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        """Let each of `masters` take over writes of others to its weight, by one kernel for each dtype."""
        if not weights or not self._can_compare:
            return
        for dtype in {weight.dtype for weight in weights}:
            self.expect(dtype)
        if not self._device.compiles:
            for weight, master in zip(weights, masters, strict=True):
                self.take_over(weight, master)
            return
        from reference_impl.optimizers.writes.masters_kernel import take_over_rows

        places = [(w.data_ptr(), m.data_ptr(), w.numel()) for w, m in zip(weights, masters, strict=True)]
        if places != self._places:
            self._tables = [
                (dtype, self._table([p for p in zip(weights, masters, strict=True) if p[0].dtype == dtype]))
                for dtype in {weight.dtype for weight in weights}
            ]
            self._places = places
        for dtype, rows in self._tables:
            self._device.launch(take_over_rows, rows, dtype, BLOCK_ELEMENTS)

    def _table(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        rows = [
            [
                weight.data_ptr() + start * weight.itemsize,
                master.data_ptr() + start * master.itemsize,
                min(BLOCK_ELEMENTS, weight.numel() - start),
            ]
            for weight, master in pairs
            for start in range(0, weight.numel(), BLOCK_ELEMENTS)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self._device.torch_device).view(-1, 3)

    def take_over(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Let `master` take over writes of others to `weight`, of a dtype that is expected."""
        if not self._can_compare:
            return
        if self._device.compiles:
            from reference_impl.optimizers.writes.masters_kernel import take_over

            self._device.launch(take_over, weight, master)
            return
        for ours, theirs in zip(weight.split(BLOCK_ELEMENTS), master.split(BLOCK_ELEMENTS), strict=True):
            self._device.launch(self._take_over, ours, theirs)

    def _take_over(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        with unseen():
            rounded, is_same, widened = (part[: weight.numel()] for part in self._scratch[weight.dtype])
            rounded.copy_(master)
            torch.eq(rounded, weight, out=is_same)
            widened.copy_(weight)
            torch.where(is_same, master, widened, out=master)
