"""The optimizers of torch that `OptimizerStateOffloader` can wrap, and how their states are taken over and given back.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.share import StreamedShare


def algorithm_of(optimizer: torch.optim.Optimizer) -> Algorithm:
    """Return the formula of a wrapped optimizer.

    Raises TypeError for anything but `torch.optim.AdamW`, `Adam` and `SGD` themselves, and as `check_group`.
    """
    algorithm: Algorithm
    if type(optimizer) is torch.optim.AdamW:
        algorithm = Adam()
    elif type(optimizer) is torch.optim.Adam:
        algorithm = Adam(decoupled=optimizer.defaults.get("decoupled_weight_decay", False))
    elif type(optimizer) is torch.optim.SGD:
        algorithm = SGD()
    else:
        raise TypeError(
            f"the formula of {type(optimizer).__name__} is not among those that update offloaded states here; expected "
            "torch.optim.AdamW, Adam or SGD, and none of their subclasses; try AdamW(fused=True)"
        )
    for group in optimizer.param_groups:
        check_group(algorithm, group)
    return algorithm


def check_group(algorithm: Algorithm, group: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the update in chunks does not have, or a parameter it cannot take."""
    if group.get("fused") is not True:
        raise ValueError(f"fused is {group.get('fused')}; expected True; try fused=True")
    checks.check_group(algorithm, group)
    if group.get("momentum") == 0:
        raise ValueError("momentum is 0; expected a positive one, without which SGD has no state to offload")


class StreamedParts:
    """The states of a streamed share as `parameter_state.StateParts`; the caller has waited for running updates."""

    def __init__(self, share: StreamedShare) -> None:
        self._share = share

    def steps(self, member: Member) -> Sequence[torch.Tensor]:
        """Return a member's step counter, on the device."""
        return [self._share.steps[member]]

    def views(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield nothing: all states are packed, or read while they stream."""
        yield from ()

    def copies(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part."""
        self._share.finish(for_writing=False)
        yield from self._share.parts(member, name)

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state by `value` (fp32, of the member's shape)."""
        self._share.finish(for_writing=True)
        self._share.write(member, name, value)

    def follow_weight(self, member: Member) -> None:
        """Do nothing: what streams of an fp32 parameter is the parameter, of which the CPU updates no other part."""
