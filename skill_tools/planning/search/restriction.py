# SPDX-License-Identifier: Apache-2.0
"""Which mechanisms a search may use: those of `--only`, without those of `--without`.

A restriction of offload leaves recomputation as the run has it, unless a mechanism that is asked for brings its own.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.dialects.candidates import (
    ATTENTION,
    BUDGET,
    DISTRIBUTED,
    FINE_GRAINED,
    HEADS,
    INPUTS,
    LAYERS,
    MECHANISMS,
    OPTIMIZER,
    RECOMPUTE,
    SHARDED,
    STATES,
    TILES,
    TRAINED,
    WEIGHTS,
    Candidate,
)
from skill_tools.dialects.run import TrainingRun
from skill_tools.errors import UnusableInput

_OF_ACTIVATIONS = (LAYERS, FINE_GRAINED, BUDGET, INPUTS, ATTENTION, TILES, HEADS)
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer": (OPTIMIZER, STATES),
        "activations": _OF_ACTIVATIONS,
        "weights": (WEIGHTS, TRAINED, SHARDED),
        "layers": (WEIGHTS, TRAINED),
    }
)
_BRING_THEIR_RECOMPUTATION = frozenset({*_OF_ACTIVATIONS, TRAINED, RECOMPUTE})
_NEED_DISTRIBUTED = frozenset({OPTIMIZER, STATES})


class Restriction(NamedTuple):
    """The mechanisms of a plan (none named: all), and the excluded ones."""

    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def allows(self, mechanism: str) -> bool:
        """Return whether a plan may use `mechanism`."""
        return mechanism not in self.without and (not self.only or mechanism in self.only)

    def left_out(self, candidate: Candidate, run: TrainingRun) -> frozenset[str]:
        """Return the forbidden mechanisms of `candidate`; empty if it may be searched."""
        used = frozenset(candidate.mechanisms)
        refused = used & self.without
        if not self.only:
            return refused
        recompute = candidate.mode.recompute or run.recompute
        stays = recompute.granularity == run.recompute.granularity
        allowed = self.only
        if stays:
            allowed |= {RECOMPUTE}
        if used & _NEED_DISTRIBUTED:
            allowed |= {DISTRIBUTED}
        refused |= used - allowed
        return refused if refused or stays or used & _BRING_THEIR_RECOMPUTATION else frozenset({RECOMPUTE})


EVERYTHING = Restriction()


def named(words: Iterable[str], option: str) -> frozenset[str]:
    """Return the mechanisms that the words of `option` name, a family's too; raises `UnusableInput` for others."""
    names = [name for word in words for name in word.split(",")]
    known = (*FAMILIES, *MECHANISMS)
    for name in names:
        if name not in known:
            raise UnusableInput(
                f"{option} {name!r}", expected=f"one of {', '.join(known)}", attempt=f"{option} optimizer"
            )
    return frozenset(mechanism for name in names for mechanism in FAMILIES.get(name, (name,)))
