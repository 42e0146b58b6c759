# SPDX-License-Identifier: Apache-2.0
"""Which block comes next, learnt from the last pass.

A pass is a sequence of visits: a block in forward, in backward, or in a forward without gradients. Training repeats
itself, so the log of visits one period ago is the forecast. If a visit differs from it, the forecast continues from
the place in the log that matches the latest visits. Nothing is assumed about the model beyond its first pass: this
starts from the listed order of its blocks.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import enum
from itertools import chain

_LOOKAHEAD = 32
_LOG_LENGTH = 4096


class Kind(enum.Enum):
    """Why a block is visited."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    EVALUATE = enum.auto()


Visit = tuple[Kind, int]


class VisitOrder:
    """The log of visits of `blocks` blocks, and the place in it that tells the future."""

    def __init__(self, blocks: int) -> None:
        """Expect a training pass over the blocks as they are listed."""
        once = range(blocks)
        evaluate: list[Visit] = [(Kind.EVALUATE, index) for index in once]
        train: list[Visit] = [
            *((Kind.FORWARD, index) for index in once),
            *((Kind.BACKWARD, index) for index in reversed(once)),
        ]
        self._log: list[Visit] = list(chain(evaluate, evaluate, train, train))
        self._next = len(self._log) - len(train)

    def visit(self, kind: Kind, block: int) -> None:
        """Take note of a visit, and find the place in the log that it corresponds to."""
        visit = (kind, block)
        if self._next < len(self._log) and self._log[self._next] == visit:
            self._next += 1
        else:
            self._next = self._place_after(visit)
        self._log.append(visit)
        if len(self._log) > _LOG_LENGTH:
            self._shorten()

    @property
    def turns(self) -> bool:
        """Whether the next visit is one of a backward, as far as is known."""
        return self._next < len(self._log) and self._log[self._next][0] is Kind.BACKWARD

    def upcoming(self) -> list[int]:
        """Return the blocks of the next visits, of few of them; a block may come more than once."""
        return [block for _, block in self._log[self._next : self._next + _LOOKAHEAD]]

    def visits_until(self, block: int) -> int:
        """Return how many visits come before the next one of `block`; all known visits, for an unknown block."""
        places = range(self._next, len(self._log))
        return next((at - self._next for at in places if self._log[at][1] == block), len(self._log))

    def _place_after(self, visit: Visit) -> int:
        """Return the place after the last visit like this, preferring one with the same visit before it."""
        before = self._log[-1]
        unknown = place = len(self._log) + 1
        for at in range(len(self._log) - 1, 0, -1):
            if self._log[at] == visit:
                if self._log[at - 1] == before:
                    return at + 1
                if place == unknown:
                    place = at + 1
        return place

    def _shorten(self) -> None:
        """Forget the oldest half, but nothing that is still ahead."""
        forgotten = min(_LOG_LENGTH // 2, self._next)
        del self._log[:forgotten]
        self._next -= forgotten
