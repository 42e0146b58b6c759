"""Which states of streamed trained layers stay on the device, and which parameters the CPU updates.

Apart because the host's room is checked by it before any optimizer is made. Explained in docs/larger-than-gpu.md,
"Where states are updated".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from offload_arithmetic.update_time import Split
from reference_impl.optimizers.layout import members_of
from reference_impl.optimizers.streamed.chunks import COMPACT_ALIGNMENT


@dataclass(frozen=True)
class StateShares:
    """Of the trained parameters: how many first elements have states that stay (`held`), and which are on the CPU.

    The states of all others stream.
    """

    held: Mapping[torch.Tensor, int] = field(default_factory=dict)
    on_cpu: AbstractSet[torch.Tensor] = frozenset()


NOTHING_STAYS = StateShares()


def state_shares(
    params: Sequence[torch.Tensor], split: Split, *, exposed: Sequence[torch.Tensor] = ()
) -> StateShares:
    """Divide `params`, in the order of the forward, by `split`.

    The states of `exposed` ones, whose update has nothing to hide behind, stay first. What stays beyond them, and what
    the CPU updates, is spread evenly, so that link and CPU are busy all along. A parameter is updated on the CPU as a
    whole, or not at all: its weight goes to one home, once.
    """
    if split.streamed == 1:
        return NOTHING_STAYS
    total = _numel(params)
    left = round(split.resident * total)
    stay: dict[torch.Tensor, int] = {}
    for param in exposed:
        stay[param] = min(left, param.numel())
        left -= stay[param]
    stay |= _spread([param for param in params if param not in stay], left)
    # A cut leaves both parts aligned in any format.
    held = {
        param: numel if numel == param.numel() else numel - numel % COMPACT_ALIGNMENT
        for param, numel in stay.items()
    }
    leave = [param for param in params if not held[param]]
    on_cpu = {
        param
        for param, numel in _spread(leave, round(split.cpu * total)).items()
        if 2 * numel > param.numel()
    }
    return StateShares({param: numel for param, numel in held.items() if numel}, on_cpu)


def _spread(params: Sequence[torch.Tensor], wanted: int) -> dict[torch.Tensor, int]:
    """Return how many elements of each of `params` are among `wanted` ones: all or none, but for one parameter."""
    members = members_of(
        [(param, 0) for param in params],
        first_order=0,
        fraction=1.0,
        streamed=min(wanted / max(_numel(params), 1), 1.0),
        offload=None,
    )
    return {member.param: member.streamed for member in members}


def _numel(params: Sequence[torch.Tensor]) -> int:
    return sum(param.numel() for param in params)
