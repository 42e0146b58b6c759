# SPDX-License-Identifier: Apache-2.0
"""Profiles a step that offloads everything: when a storage is saved and needed, and the cost of recomputing it.

Each recipe is verified: its result is compared, byte for byte, with the copy from the host. A recipe that fails is
dropped, so recomputation is as exact as a copy.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import statistics
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from reference_impl.activations.budget import ProfiledStorage, StepProfile
from reference_impl.activations.geometry import WrittenError, flat_bytes
from reference_impl.activations.headroom import Headroom, SegmentPeaks
from reference_impl.activations.run import ForwardPass, Replay
from reference_impl.device import Device, Mark
from reference_impl.memory.rates import LinkSpeed


@dataclass
class _Observation:
    name: str
    size_bytes: int
    saved: int
    recipe: Replay | None
    sources: set[int]
    needed: int | None = None


class ComputeClock:
    """Counts the time of computation alone: stopped while the engine makes the device wait."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._intervals: list[tuple[Mark, Mark]] = []
        self._began: Mark | None = None

    def start(self) -> None:
        """Go on."""
        self._began = self._device.mark()

    def stop(self) -> int:
        """Stand still; return the reading, which `seconds` turns into time."""
        if self._began is not None:
            self._intervals.append((self._began, self._device.mark()))
            self._began = None
        return len(self._intervals)

    def seconds(self) -> list[float]:
        """Return the time at each reading, from 0."""
        times = [0.0]
        for began, ended in self._intervals:
            times.append(times[-1] + began.seconds_until(ended))
        return times


class StepProfiler:
    """Watches one run."""

    def __init__(self, run: ForwardPass, device: Device, headroom: Headroom) -> None:
        self._run = weakref.ref(run)
        self._headroom = headroom
        self._forward = ComputeClock(device)
        self._backward = ComputeClock(device)
        self._forward_end: int | None = None
        self._observed: dict[int, _Observation] = {}
        self._is_backward = False
        self._is_ended = False
        self._forward.start()

    @property
    def is_over(self) -> bool:
        """Whether backward has asked for everything, or the graph is gone."""
        run = self._run()
        return run is None or (run.has_saved and not run.is_pending)

    @property
    def is_broken(self) -> bool:
        """Whether backward has begun and, by the time of the next forward, not ended: an error has stopped it."""
        return self._is_backward and not self._is_ended

    @property
    def has_seen_backward(self) -> bool:
        """Whether backward has asked for a storage: without one there is nothing to plan."""
        return any(observed.needed is not None for observed in self._observed.values())

    @property
    def largest_bytes(self) -> int:
        """The size of the largest storage."""
        return max(observed.size_bytes for observed in self._observed.values())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Stop the forward's clock while the engine may make the device wait."""
        self._forward.stop()
        yield
        self._forward.start()

    def saved(self, index: int, size_bytes: int, name: str, recipe: Replay | None) -> None:
        """Note the bytes of storage `index`, the operator `name` that made it, and its recipe, if it has one."""
        sources = recipe.sources() if recipe is not None else set()
        self._observed[index] = _Observation(name, size_bytes, self._forward.stop(), recipe, sources)

    def start_loss(self) -> None:
        """Note that the forward is over; its clock goes on for the loss."""
        self._forward_end = self._forward.stop()
        self._forward.start()

    def start_backward(self) -> None:
        """Go on with the backward's clock, until this backward is over."""
        self._is_backward = True
        self._forward.stop()
        self._backward.start()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward.stop()
        self._is_ended = True

    def fetching(self) -> None:
        """Stop the backward's clock: the device may have to wait."""
        if not self._is_backward:
            self.start_backward()
        self._backward.stop()

    def fetched(self, index: int, flat: torch.Tensor) -> None:
        """Note when storage `index` was needed first, and compare its recipe's result with `flat`."""
        observed, run = self._observed.get(index), self._run()
        if observed is not None and observed.needed is None and run is not None:
            observed.needed = self._backward.stop()
            self._prove(observed, flat, run)
            # Neither the proof nor its fetched storages are part of the measured step.
            self._headroom.restart_segment(run)
        self._backward.start()

    def result(self, peaks: SegmentPeaks, link: LinkSpeed) -> StepProfile:
        """Return the profile. Waits for the device."""
        forward_s, backward_s = self._forward.seconds(), self._backward.seconds()
        # Resident storages have numbers too: a number is no place among the moved ones.
        places = {index: place for place, index in enumerate(sorted(self._observed))}
        storages = [
            ProfiledStorage(
                name=observed.name,
                size_bytes=observed.size_bytes,
                saved_at_s=forward_s[observed.saved],
                # A storage that backward never asked for is needed last.
                needed_at_s=backward_s[-1 if observed.needed is None else observed.needed],
                recompute_s=_cost_s(observed.recipe),
                made_from=tuple(sorted(places[source] for source in observed.sources if source in places)),
            )
            for _, observed in sorted(self._observed.items())
        ]
        end_s = forward_s[-1 if self._forward_end is None else self._forward_end]
        return StepProfile(
            storages=_with_equal_costs(storages),
            forward_s=end_s,
            loss_s=forward_s[-1] - end_s,
            backward_s=backward_s[-1],
            forward_peak_bytes=max(*peaks["forward"], *peaks["loss"]),
            backward_peak_bytes=tuple(peaks["backward"]),
            d2h_bytes_per_s=link.d2h_bytes_per_s,
            h2d_bytes_per_s=link.h2d_bytes_per_s,
        )

    def _prove(self, observed: _Observation, flat: torch.Tensor, run: ForwardPass) -> None:
        if observed.recipe is None:
            return
        run.is_proving = True
        try:
            computed = observed.recipe.compute().untyped_storage()
            is_same = computed.nbytes() == flat.numel() and torch.equal(
                flat_bytes(computed, 0, flat.numel()), flat
            )
        except WrittenError:
            # An input that autograd has not saved may be written, as a queue of means is.
            is_same = False
        finally:
            run.is_proving = False
        observed.recipe.release()
        if not is_same:
            observed.recipe = None


def _with_equal_costs(storages: Sequence[ProfiledStorage]) -> tuple[ProfiledStorage, ...]:
    """Give equal operations the median of their costs: differences between them are noise."""
    costs: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for storage in storages:
        if storage.recompute_s is not None:
            costs[storage.name, storage.size_bytes].append(storage.recompute_s)
    return tuple(
        replace(storage, recompute_s=statistics.median(costs[storage.name, storage.size_bytes]))
        if storage.recompute_s is not None
        else storage
        for storage in storages
    )


def _cost_s(recipe: Replay | None) -> float | None:
    return None if recipe is None else recipe.seconds()
