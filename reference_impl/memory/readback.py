"""A few numbers of the device on their way to the host, where any thread may wait for them.

Apart because the clip decision and the comparison of weights, which know nothing of each other, read numbers alike.
Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.interrupts import deferred_interrupts


class Readback:
    """The copy of `values` to a block of `arena`, behind the live current stream; the block goes back with this.

    Args:
        device: where `values` are.
        arena: the host memory that they come to.
        values: a flat tensor, which is kept alive while it is copied.

    Raises HostMemoryError.
    """

    def __init__(self, device: Device, arena: HostArena, values: torch.Tensor) -> None:
        self._values = values
        made = device.record()
        with deferred_interrupts():
            block = arena.allocate(values.nbytes)
            self._arrival = made
            try:
                self._host = block.view(values.dtype, (values.numel(),))
                self._arrival = device.copy_out(self._host, values, after=[made], for_threads=True)
                # Also where nobody reads it: of a step, say, that fails before it begins.
                self._free = weakref.finalize(self, arena.free, block, after=self._arrival)
            except BaseException:
                arena.free(block, after=self._arrival)
                raise

    def read(self) -> list[Any]:
        """Wait for the copy and return the numbers, once: the block goes back."""
        self._arrival.synchronize()
        numbers: list[Any] = self._host.tolist()
        # A finalizer that is cut short is over, and has done nothing.
        with deferred_interrupts():
            self._free()
        return numbers
