# SPDX-License-Identifier: Apache-2.0
"""A few numbers of the device on their way to the host, where any thread may wait for them.

Apart because the clip decision and the comparison of weights read numbers alike without knowing each other. Explained
in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.arena import HostArena, HostBlock
from reference_impl.memory.closing import owned


class Readback:
    """The copy of `values` to a block of `arena`, behind the live current stream; the block goes back with this.

    Args:
        device: the device of `values`. arena: the host memory that they come to. values: a flat tensor, kept alive
            during its copy.

    Raises HostMemoryError.
    """

    def __init__(self, device: Device, arena: HostArena, values: torch.Tensor) -> None:
        self._values = values
        made = device.record()
        # The block goes back also if nobody reads it, as after a step that fails before its begin.
        copy, self._free = owned(
            self,
            partial(_started, device, arena, values, made),
            lambda copy: arena.free(copy[0], after=copy[2]),
        )
        _, self._host, self._arrival = copy

    def read(self) -> list[Any]:
        """Wait for the copy and return the numbers, once: the block goes back."""
        self._arrival.synchronize()
        numbers: list[Any] = self._host.tolist()
        self._free()
        return numbers


def _started(
    device: Device, arena: HostArena, values: torch.Tensor, made: Event
) -> tuple[HostBlock, torch.Tensor, Event]:
    """Start the copy of `values`, which are there behind `made`: its block, the block's numbers, its end."""
    block, arrival = arena.allocate(values.nbytes), made
    try:
        host = block.view(values.dtype, (values.numel(),))
        arrival = device.copy_out(host, values, after=[made], for_threads=True)
        return block, host, arrival
    except BaseException:
        arena.free(block, after=arrival)
        raise
