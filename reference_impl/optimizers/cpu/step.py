"""The CPU share's bookkeeping of one step: what has been queued, begun and finished.

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
        self._counts: dict[Member, torch.Tensor] = {}
        self._done: dict[Member, dict[object, int]] = {}
        self._publishers: dict[Member, object] = {}

    def scale_and_skip(self) -> tuple[torch.Tensor | None, bool]:
        """Return what divides gradients (0-dim fp32 on the host, None for exactly 1) and whether to skip the step."""
        scale, found = self._read()[:2]
        return (None if scale == 1.0 else torch.tensor(scale)), found != 0

    @property
    def skips(self) -> bool:
        """Whether the step is skipped."""
        return self._read()[1] != 0

    def factors(self, member: Member) -> tuple[float, ...]:
        """Return what a member's gradient is multiplied by, in order, those of exactly 1 left out."""
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

    def count(self, member: Member) -> None:
        """Count the step of `member`, once however many buckets it has, and however often an error ends this."""
        with self._lock:
            if member not in self._counted:
                if member not in self._counts:
                    self._counts[member] = member.step + 1
                member.step.copy_(self._counts[member])
                self._counted.add(member)

    def finish(self, member: Member, pieces: int, *, update: object, job: object) -> bool:
        """Count the `pieces` of `member` in an update; return whether all are updated, and `job` is to publish it.

        `update` and `job` are tokens: the objects themselves know the step, and only the collector would free them.

        One job is, the first that asks then, and hears so again if it asks again after an error.
        """
        with self._lock:
            done = self._done.setdefault(member, {})
            done[update] = pieces
            return (
                sum(done.values()) == len(member.pieces) and self._publishers.setdefault(member, job) is job
            )


class BucketUpdate:
    """One bucket in one step: what its jobs share, and in `left` those that are still to do.

    Args:
        step: the step.
        present: the members that take part, each with its number of pieces in the bucket.
        new_weights: yields the parts of a member that the device has updated and that go out with the CPU's.
        last_use: the event after which nothing reads the members' old weights; None for each gradient's arrival.
    """

    __slots__ = ("_lock", "_token", "last_use", "left", "new_weights", "present", "step")

    def __init__(
        self,
        step: CpuStep,
        present: Counter[Member],
        new_weights: Callable[[Member], Iterable[NewWeights]],
        last_use: Event | None,
    ) -> None:
        self.step = step
        self.present = present
        self.new_weights = new_weights
        self.last_use = last_use
        self.left: set[object] = set()
        self._lock, self._token = threading.Lock(), object()

    def finish(self, job: object, token: object) -> list[Member]:
        """Count `job` as done; after the last return the members that it is to publish, every piece being updated.

        `token` stands for the job and lives as long as the step.

        After an error it may be called again.
        """
        with self._lock:
            self.left.discard(job)
            if self.left:
                return []
        return [
            member
            for member, pieces in self.present.items()
            if self.step.finish(member, pieces, update=self._token, job=token)
        ]
