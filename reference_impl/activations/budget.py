# SPDX-License-Identifier: Apache-2.0
"""Chooses which saved tensors to keep, offload and recompute: the least time under a budget of device memory.

A copy costs no time while the link keeps up with the computation, and its full time once it does not; recomputing
takes the time of the operation. So the results that are cheapest to recompute are recomputed, the last ones saved stay
on the device, and the rest is copied. Simulating the step finds how many of each. This file is arithmetic on a
profile; it touches no tensor.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from reference_impl.activations.policy import Decision

# Copies cost the computation beside them this share of their own time (one NVIDIA H200: matrix products ran at
# 0.957 of their speed under full traffic).
CONTENTION = 0.043
_MOST_CANDIDATES = 64


class BudgetError(ValueError):
    """The budget is smaller than the bytes that must stay on the device, `least_bytes`."""

    def __init__(self, *, budget_bytes: int, least_bytes: int) -> None:
        super().__init__(
            f"budget_bytes={budget_bytes} ({budget_bytes / 2**30:.2f} GiB) is below the bytes that must stay on the "
            f"device; expected at least {least_bytes} ({least_bytes / 2**30:.2f} GiB), the peak with everything "
            f"offloaded; try budget_bytes={least_bytes}, a smaller micro-batch, or offloading optimizer state"
        )
        self.least_bytes = least_bytes


@dataclass(frozen=True, kw_only=True)
class ProfiledStorage:
    """One saved storage: the operator that made it, its bytes, when forward saves and backward needs it, and its cost.

    Times count computation alone, each pass from 0. `recompute_s` is None where the storage cannot be recomputed.
    Otherwise it is recomputed from weights and the storages `made_from`, given by their places in the order of saving.
    """

    name: str
    size_bytes: int
    saved_at_s: float
    needed_at_s: float
    recompute_s: float | None = None
    made_from: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A step with everything offloaded: its storages in the order of saving, compute times, peaks, and the link.

    `forward_peak_bytes` includes the loss. `backward_peak_bytes[n]` is the peak after `n` storages were needed.
    Neither counts prefetched bytes.
    """

    storages: tuple[ProfiledStorage, ...]
    forward_s: float
    loss_s: float
    backward_s: float
    forward_peak_bytes: int
    backward_peak_bytes: tuple[int, ...]
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float

    @property
    def peak_bytes(self) -> int:
        """The peak of this step: no plan that recomputes nothing has a lower one."""
        return max(self.forward_peak_bytes, *self.backward_peak_bytes)


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """One decision for each saved storage of a step, with the step's predicted time and peak."""

    names: tuple[str, ...]
    size_bytes: tuple[int, ...]
    decisions: tuple[Decision, ...]
    predicted_s: float
    predicted_peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self) | {"decisions": [decision.value for decision in self.decisions]}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> BudgetPlan:
        """Return the plan that `to_dict` gave."""
        return BudgetPlan(
            names=tuple(values["names"]),
            size_bytes=tuple(values["size_bytes"]),
            decisions=tuple(Decision(value) for value in values["decisions"]),
            predicted_s=values["predicted_s"],
            predicted_peak_bytes=values["predicted_peak_bytes"],
        )

    def bytes_of(self, decision: Decision) -> int:
        """Return the bytes of all storages with this `decision`."""
        return sum(
            size for size, each in zip(self.size_bytes, self.decisions, strict=True) if each is decision
        )

    def __str__(self) -> str:
        """Return a table: operator, number of storages, GiB, decision."""
        groups: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for name, size, decision in zip(self.names, self.size_bytes, self.decisions, strict=True):
            groups[name, decision.value] += 1
            sizes[name, decision.value] += size
        lines = [f"{'result of':<44} {'storages':>8} {'GiB':>8}  decision"]
        lines += [
            f"{name:<44} {groups[name, decision]:>8} {size / 2**30:>8.2f}  {decision}"
            for (name, decision), size in sorted(sizes.items(), key=lambda item: -item[1])
        ]
        lines.append(
            f"predicted: {self.predicted_s * 1e3:.1f} ms of computation and waiting, "
            f"peak {self.predicted_peak_bytes / 2**30:.2f} GiB"
        )
        return "\n".join(lines)


def simulate(profile: StepProfile, decisions: Sequence[Decision]) -> float:
    """Return the seconds that a step takes, with copies in the order of saving and of need."""
    pairs = list(zip(profile.storages, decisions, strict=True))
    offloaded_bytes = sum(storage.size_bytes for storage, each in pairs if each is Decision.OFFLOAD)
    d2h_s, h2d_s = offloaded_bytes / profile.d2h_bytes_per_s, offloaded_bytes / profile.h2d_bytes_per_s
    link_free_s = 0.0
    for storage, decision in pairs:
        if decision is Decision.OFFLOAD:
            link_free_s = max(link_free_s, storage.saved_at_s) + storage.size_bytes / profile.d2h_bytes_per_s
    forward_s = max(profile.forward_s, link_free_s)
    now_s = last_s = arrived_s = 0.0
    recomputed = {index for index, each in enumerate(decisions) if each is Decision.RECOMPUTE}
    early = {
        index: profile.storages[by].needed_at_s for index, by in _first_users(profile, recomputed).items()
    }
    in_turn = [(early.get(index, pair[0].needed_at_s), *pair) for index, pair in enumerate(pairs)]
    for needed_at_s, storage, decision in sorted(in_turn, key=lambda each: each[0]):
        now_s += needed_at_s - last_s
        last_s = needed_at_s
        if decision is Decision.OFFLOAD:
            arrived_s += storage.size_bytes / profile.h2d_bytes_per_s
            now_s = max(now_s, arrived_s)
        elif decision is Decision.RECOMPUTE:
            now_s += storage.recompute_s or 0.0
    return forward_s + profile.loss_s + now_s + profile.backward_s - last_s + CONTENTION * (d2h_s + h2d_s)


def plan_budget(profile: StepProfile, budget_bytes: int, *, recomputing: bool = True) -> BudgetPlan:
    """Return the fastest plan found whose peak stays within `budget_bytes`; it may do without `recomputing`.

    Raises BudgetError when even offloading everything does not fit.
    """
    if profile.peak_bytes > budget_bytes:
        raise BudgetError(budget_bytes=budget_bytes, least_bytes=profile.peak_bytes)
    cheapest_first = sorted(
        (index for index, storage in enumerate(profile.storages) if storage.recompute_s is not None),
        key=lambda index: (_seconds_per_byte(profile.storages[index]), -index),
    )
    counts = {
        math.ceil(len(cheapest_first) * share / _MOST_CANDIDATES) for share in range(_MOST_CANDIDATES + 1)
    }
    candidates = []
    for count in sorted(counts) if recomputing else [0]:
        decisions, peak_bytes = _decide(profile, set(cheapest_first[:count]), budget_bytes)
        if peak_bytes <= budget_bytes:
            candidates.append((simulate(profile, decisions), peak_bytes, decisions))
    seconds, peak_bytes, decisions = min(candidates, key=lambda candidate: candidate[0])
    return BudgetPlan(
        names=tuple(storage.name for storage in profile.storages),
        size_bytes=tuple(storage.size_bytes for storage in profile.storages),
        decisions=tuple(decisions),
        predicted_s=seconds,
        predicted_peak_bytes=peak_bytes,
    )


def _decide(profile: StepProfile, recomputed: set[int], budget_bytes: int) -> tuple[list[Decision], int]:
    """Keep the last saved that fit, since backward needs them first; offload the rest. Return the peak bytes too."""
    storages = profile.storages
    rank = {index: position for position, index in enumerate(_by_need(profile))}
    decisions = [Decision.OFFLOAD] * len(storages)
    forward_bytes = profile.forward_peak_bytes
    backward_bytes = numpy.array(profile.backward_peak_bytes, dtype=numpy.int64)
    early = {index: rank[user] for index, user in _first_users(profile, recomputed).items()}
    for index, first in early.items():
        backward_bytes[first : rank[index] + 1] += storages[index].size_bytes
    for index in reversed(range(len(storages))):
        size_bytes = storages[index].size_bytes
        if index in recomputed:
            decisions[index] = Decision.RECOMPUTE
            continue
        # A kept storage lies there from its saving to its use, whether or not something else needs it early.
        until_used = backward_bytes[: rank[index] + 1].copy()
        until_used[: early.get(index, rank[index] + 1)] += size_bytes
        if max(forward_bytes + size_bytes, until_used.max()) <= budget_bytes:
            decisions[index] = Decision.KEEP
            forward_bytes += size_bytes
            backward_bytes[: rank[index] + 1] = until_used
    return decisions, int(max(forward_bytes, backward_bytes.max()))


def _by_need(profile: StepProfile) -> list[int]:
    storages = profile.storages
    return sorted(range(len(storages)), key=lambda index: storages[index].needed_at_s)


def _first_users(profile: StepProfile, recomputed: set[int]) -> dict[int, int]:
    """Return, for each storage needed early by recomputation, the first storage recomputed from it."""
    by_need = _by_need(profile)
    rank = {index: position for position, index in enumerate(by_need)}
    users: dict[int, int] = {}
    for index in by_need:
        waiting = [index] if index in recomputed else []
        while waiting:
            for source in profile.storages[waiting.pop()].made_from:
                if rank[index] < rank[users.get(source, source)]:
                    users[source] = index
                    waiting += [source] if source in recomputed else []
    return users


def _seconds_per_byte(storage: ProfiledStorage) -> float:
    return (storage.recompute_s or 0.0) / storage.size_bytes
