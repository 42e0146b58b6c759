"""The states of a streamed share in the layout of `torch.optim`, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import MASTER
from reference_impl.optimizers.streamed.share import StreamedShare


def read(share: StreamedShare, member: Member) -> dict[str, torch.Tensor]:
    """Return copies of a member's states on the CPU, in the parameter's shape, or nothing before the first step."""
    step = share.steps[member]
    if step.item() == 0:
        return {}
    # SGD saves no step.
    counted = {"step": step.cpu().clone()} if "exp_avg" in share.moments else {}
    return {**counted, **{name: _gather(share, member, name) for name in _names(share, member)}}


def check(share: StreamedShare, index: int, member: Member, saved: Mapping[str, Any]) -> None:
    """Raise ValueError when a state of parameter `index` has another shape than the parameter."""
    for name in _names(share, member):
        value = saved.get(name)
        if value is not None and value.shape != member.param_local.shape:
            raise ValueError(
                f"{name} of parameter {index} has shape {tuple(value.shape)}; expected "
                f"{tuple(member.param_local.shape)}; try the checkpoint of this model"
            )


def write(share: StreamedShare, member: Member, saved: Mapping[str, Any]) -> None:
    """Replace the states of a member; moments that are not in `saved` become 0, the master the parameter."""
    # SGD saves no step: having a moment says that there was one.
    share.steps[member].fill_(float(saved.get("step", bool(saved))))
    for name in _names(share, member):
        value = saved.get(name)
        if value is None:
            value = member.param_local if name == MASTER else torch.zeros(())
        share.write(member, name, value)


def _names(share: StreamedShare, member: Member) -> tuple[str, ...]:
    """Return the states that a state_dict has: the moments, and the master unless the parameter is one itself."""
    return share.moments if member.param.dtype == torch.float32 else (*share.moments, MASTER)


def _gather(share: StreamedShare, member: Member, name: str) -> torch.Tensor:
    whole = torch.empty_like(member.param_local, dtype=torch.float32, device="cpu")
    flat = member.flat(whole)
    for start, part in share.parts(member, name):
        flat[start : start + part.numel()].copy_(part)
    return whole
