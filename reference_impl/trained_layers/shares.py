# SPDX-License-Identifier: Apache-2.0
"""The resident states of streamed trained layers, and the parameters updated on the CPU.

Apart because the host's room is checked by it before any optimizer is made. Explained in docs/larger-than-gpu.md,
"Where states are updated".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from offload_arithmetic.update_time import Split
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.layout import Member, members_of
from reference_impl.optimizers.streamed.chunks import COMPACT_ALIGNMENT


@dataclass(frozen=True)
class StateShares:
    """For trained parameters: the number of first elements with resident states (`staying`), and the ones on the CPU.

    The states of all others stream.
    """

    staying: Mapping[torch.Tensor, int] = field(default_factory=dict)
    on_cpu: AbstractSet[torch.Tensor] = frozenset()


NOTHING_STAYS = StateShares()
NO_MATRICES: Mapping[torch.Tensor, MatrixAlgorithm] = {}


def state_shares(
    params: Sequence[torch.Tensor],
    split: Split,
    *,
    exposed: Sequence[torch.Tensor] = (),
    matrices: Mapping[torch.Tensor, MatrixAlgorithm] = NO_MATRICES,
) -> StateShares:
    """Divide `params`, in the order of the forward, by `split`.

    The states of `exposed` ones, whose update has nothing to hide behind, stay first. Other resident states, and the
    CPU's, are spread evenly: link and CPU are busy all along. A parameter is updated on the CPU as a whole, or not at
    all: its weight goes to one home, once. Parameters under formulas of `matrices` are divided separately, in whole
    matrices, and the CPU has none of them.
    """
    if split.streamed == 1:
        return NOTHING_STAYS
    cut = [param for param in params if param not in matrices]
    whole = [param for param in params if param in matrices]
    staying = {
        param: numel if numel == param.numel() else numel - numel % _unit(param, matrices.get(param))
        for alike in (cut, whole)
        for param, numel in _staying(alike, split.resident, exposed).items()
    }
    leaving = [param for param in cut if not staying[param]]
    on_cpu = {
        param
        for param, numel in _spread(leaving, round(split.cpu * _numel(cut))).items()
        if 2 * numel > param.numel()
    }
    return StateShares({param: numel for param, numel in staying.items() if numel}, on_cpu)


def _staying(
    params: Sequence[torch.Tensor], share: float, exposed: Sequence[torch.Tensor]
) -> dict[torch.Tensor, int]:
    """Return how many elements of each of `params` stay, a `share` of all: of `exposed` ones first."""
    rest = round(share * _numel(params))
    stay: dict[torch.Tensor, int] = {}
    ours = set(params)
    for param in exposed:
        if param in ours:
            stay[param] = min(rest, param.numel())
            rest -= stay[param]
    return stay | _spread([param for param in params if param not in stay], rest)


def _unit(param: torch.Tensor, formula: MatrixAlgorithm | None) -> int:
    """Return of how many elements a part of `param` that stays is a multiple: of a matrix's, or aligned in any form."""
    return COMPACT_ALIGNMENT if formula is None else max(Member(param, 0, 0, 0, matrices=formula).unit, 1)


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
