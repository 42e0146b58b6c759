"""The CPU share's bookkeeping of one step: what has been queued, begun and finished.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from reference_impl.device import Event
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, NewWeights
from reference_impl.optimizers.step import StepPlan


class CpuStep:
    """One step of all members that take part, shared by all workers.

    `queued` are the buckets whose update has been handed to the workers.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.queued: set[Bucket] = set()
        self._lock = threading.Lock()
        self._decided: tuple[torch.Tensor | None, bool] | None = (
            (None, False) if plan.decision is None else None
        )
        self._begun: set[Member] = set()
        self._done: Counter[Member] = Counter()

    def scale_and_skip(self) -> tuple[torch.Tensor | None, bool]:
        """Return what divides gradients (0-dim fp32 on the host, None for exactly 1) and whether to skip the step."""
        with self._lock:
            if self._decided is None:
                assert self.plan.decision is not None
                self._decided = self.plan.decision.read()
            return self._decided

    def begin(self, member: Member) -> None:
        """Count the step of `member`, once however many buckets it has."""
        with self._lock:
            if member not in self._begun:
                self._begun.add(member)
                member.step += 1

    def finish(self, member: Member, pieces: int) -> bool:
        """Count `pieces` of `member` as updated; return whether these were the last."""
        with self._lock:
            self._done[member] += pieces
            return self._done[member] == len(member.pieces)


class BucketUpdate:
    """One bucket in one step: what its `tasks` share, and how many of them are still to do.

    Args:
        step: the step.
        present: the members that take part, each with its number of pieces in the bucket.
        tasks: into how many the update is cut.
        new_weights: yields the parts of a member that the device has updated and that go out with the CPU's.
        last_use: the event after which nothing reads the members' old weights; None for each gradient's arrival.
    """

    __slots__ = ("_lock", "_tasks", "last_use", "new_weights", "present", "step")

    def __init__(
        self,
        step: CpuStep,
        present: Counter[Member],
        tasks: int,
        new_weights: Callable[[Member], Iterable[NewWeights]],
        last_use: Event | None,
    ) -> None:
        self.step = step
        self.present = present
        self.new_weights = new_weights
        self.last_use = last_use
        self._tasks = tasks
        self._lock = threading.Lock()

    def finish_task(self) -> bool:
        """Count a task as done; return whether it was the last."""
        with self._lock:
            self._tasks -= 1
            return self._tasks == 0
