"""The optimizers of torch that `OptimizerStateOffloader` can wrap, and how their states are taken over and given back.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers import checks
from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm
from reference_impl.optimizers.gradient_in_use import GradientInUse
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


def standing(members: Iterable[Member]) -> dict[Member, tuple[torch.Tensor, int]]:
    """Return the gradients that are on the parameters of `members`, with their versions."""
    grads = ((member, _itself(member.param.grad)) for member in members)
    return {member: (grad, version_of(grad)) for member, grad in grads if grad is not None}


def _itself(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.gradient if isinstance(gradient, GradientInUse) else gradient


def are_standing(taken: Mapping[Member, tuple[torch.Tensor, int]], members: Iterable[Member]) -> bool:
    """Return whether gradients are on the parameters of `members`, and all are those `taken` by a step that failed."""
    found = standing(members) if taken else {}
    return bool(found) and all(
        taken.get(member, (None, 0))[0] is grad and taken[member][1] == version
        for member, (grad, version) in found.items()
    )


def version_of(gradient: torch.Tensor) -> int:
    """Return a number that changes when a gradient is written in place."""
    return 0 if gradient.is_inference() else gradient._version


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
