# SPDX-License-Identifier: Apache-2.0
"""The protocol of a weight that is kept on the host and used on the device: its streamer and its optimizer share it.

The streamer copies a block's weights to the device and frees their device memory again. The optimizer updates them
while they are there and copies them back to their home, the host memory, or updates them at home and copies them to
where they have been brought before. Neither imports the other, only this.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from typing import Protocol

import torch

from reference_impl.device import Event


def refuse_update(block_index: int) -> RuntimeError:
    """Return the error for an update that reaches lent weights."""
    return RuntimeError(
        f"an update reached block {block_index} while its weights are lent; expected them back; try leaving gathered() "
        "before step() or the next forward, and after Ctrl-C inside it entering and leaving it again"
    )


class WeightHome(Protocol):
    """Where the weight of one parameter is. The weights of a block visit the device together.

    They lie there as on the host, so the same bytes follow a weight in both places.
    """

    @property
    def host(self) -> torch.Tensor:
        """The weight on the host: flat, in the parameter's dtype; whole once the last copy home has ended."""

    def host_part(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of `host`, or beyond it of the weights that follow this one."""

    def expect(self) -> None:
        """Know that an update of `host` has begun: what the device has of it is old until `bring`."""

    def renew(self, start: int, weights: torch.Tensor) -> None:
        """Write `weights` into `host` from element `start`: newer than the device's until `bring`."""

    def device_part(self, start: int, stop: int) -> torch.Tensor:
        """Return the same elements in the memory that they have on the device between `visit` and `leave`."""

    @property
    def is_lent(self) -> bool:
        """Whether the user has the weights of the block as ordinary tensors; they will go home as they are then."""

    def bring(self) -> Event:
        """Copy the weight to the device once more if its block is there or on its way; return the event of its end."""

    @property
    def block_index(self) -> int:
        """A number that the parameters of one block have in common."""

    def visit(self) -> Event:
        """Have the weights of the block stay on the device until `leave`; return the event after which they are there.

        Raises RuntimeError for weights lent to the user, and torch's error for want of memory.
        """

    def leave(self, stored: Event) -> None:
        """Let them go once `stored` is reached, the end of all copies home."""
