# SPDX-License-Identifier: Apache-2.0
"""The CPU share's bookkeeping of one step: queued buckets, counted and updated members.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from reference_impl.device import Event
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, NewWeights
from reference_impl.optimizers.step import StepPlan
from reference_impl.optimizers.writes.sums import WrittenWeights


class CpuStep:
    """One step of all members that take part, shared by all workers.

    `arrivals` are the members that take part, each with the event of its gradient's copy. `queued` are the buckets
    whose update has been handed to the workers.

    Args:
        plan: the step.
        factors: which of the decision's factors each member's gradient is multiplied by; none where it is not in it.
    """

    def __init__(self, plan: StepPlan, factors: Mapping[Member, Sequence[int]] | None = None) -> None:
        self.plan = plan
        self.arrivals: dict[Member, Event] = {}
        self.queued: set[Bucket] = set()
        self._factors = factors or {}
        self._lock = threading.Lock()
        self._numbers: list[float] | None = [1.0, 0.0] if plan.decision is None else None
        self._counted: set[Member] = set()
        self._updated: Counter[Member] = Counter()

    def scale_and_skip(self) -> tuple[torch.Tensor | None, bool]:
        """Return the divisor of gradients (0-dim fp32 on the host, None for exactly 1) and whether to skip the step."""
        scale, found = self._read()[:2]
        return (None if scale == 1.0 else torch.tensor(scale)), found != 0

    def factors(self, member: Member) -> tuple[float, ...]:
        """Return the factors of a member's gradient, in order, without factors of exactly 1."""
        indices = self._factors.get(member)
        if not indices:
            return ()
        numbers = self._read()
        return tuple(numbers[2 + index] for index in indices if numbers[2 + index] != 1.0)

    def _read(self) -> list[float]:
        with self._lock:
            if self._numbers is None:
                assert self.plan.decision is not None
                self._numbers = self.plan.decision.read()
            return self._numbers

    def count(self, members: Iterable[Member]) -> None:
        """Count the step of each of `members` once, however many buckets it has."""
        with self._lock:
            for member in members:
                if member not in self._counted:
                    self._counted.add(member)
                    member.step.add_(1)

    def finish(self, pieces: Counter[Member]) -> list[Member]:
        """Note that so many pieces of each member are updated; return the members without further pieces."""
        with self._lock:
            self._updated.update(pieces)
            return [member for member in pieces if self._updated[member] == len(member.pieces)]


class BucketUpdate:
    """One bucket in one step, shared by its `tasks` jobs.

    Args:
        step: the step.
        present: the members that take part, each with its number of pieces in the bucket.
        tasks: how many jobs update it.
        new_weights: yields the parts of a member updated on the device and published with the CPU's.
        last_use: the event after which nothing reads the members' old weights; None for each gradient's arrival.
        written: the weights written by other code, once known.
    """

    __slots__ = ("_lock", "_unfinished", "_written", "last_use", "new_weights", "present", "step")

    def __init__(
        self,
        step: CpuStep,
        present: Counter[Member],
        tasks: int,
        new_weights: Callable[[Member], Iterable[NewWeights]],
        last_use: Event | None,
        written: WrittenWeights[Member] | None,
    ) -> None:
        self.step = step
        self.present = present
        self.new_weights = new_weights
        self.last_use = last_use
        self._written = written
        self._lock, self._unfinished = threading.Lock(), tasks

    def written(self) -> frozenset[Member]:
        """Return the weights that others have written; waits until the device has compared them."""
        return frozenset() if self._written is None else self._written.read()

    def finish(self) -> list[Member]:
        """Note that a job is done; after the last one return the members with all pieces updated."""
        with self._lock:
            self._unfinished -= 1
            if self._unfinished:
                return []
        return self.step.finish(self.present)
