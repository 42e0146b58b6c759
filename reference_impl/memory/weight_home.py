"""A weight that lives on the host, visits the device, and is written there: what its streamer and its optimizer share.

The streamer brings a block's weights and takes their memory away again; the optimizer changes them while they are there
and sends them home. Neither knows the other, only this.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from typing import Protocol

import torch

from reference_impl.device import Event


class WeightHome(Protocol):
    """Where the weight of one parameter is. The weights of a block visit the device together."""

    @property
    def host(self) -> torch.Tensor:
        """The weight on the host: flat, in the parameter's dtype; whole once the last copy home has ended."""

    @property
    def device(self) -> torch.Tensor:
        """The same elements in the memory that they have on the device between `visit` and `leave`."""

    @property
    def visitors(self) -> int:
        """A number that the parameters of one block have in common."""

    def visit(self) -> Event:
        """Have the weights of the block stay on the device until `leave`; return the event after which they are there.

        Raises RuntimeError where they are lent to the user, and what torch raises where memory is short.
        """

    def leave(self, stored: Event) -> None:
        """Let them go once `stored` is reached, the end of all copies home."""
