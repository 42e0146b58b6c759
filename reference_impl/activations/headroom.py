# SPDX-License-Identifier: Apache-2.0
"""The headroom: the bytes that may be on the device while they wait for their copy out, or prefetched.

Too many raise the peak, too few stall the compute stream. So the first step runs with as few as possible, and is
measured in segments: from one saved storage or block to the next, the loss, from one restored storage to the next. In a
layer that is computed again a segment also ends where backward takes one of its tensors, because the layer's peak may
be long over when its last storage is in use.
Memory below the step's peak that a segment leaves free costs nothing. From then on as many bytes may be in flight or
prefetched: the loss usually needs gigabytes for an instant, free during the rest.

On an accelerator the first step resets the allocator's peak statistics. On the CPU twin bytes are counted while a
ledger is open; without one, as few bytes as possible stay in flight. The headroom of a forward of another length is
unknown.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from offload_arithmetic.sizes import ACTIVATIONS_IN_FLIGHT_BYTES
from reference_impl.activations.run import ForwardPass
from reference_impl.device import Device, Event
from reference_impl.memory.in_flight import InFlight
from reference_impl.memory.ledger import device_bytes, mark_peak, marked_peak_bytes

Phase = Literal["forward", "loss", "backward"]
SegmentPeaks = dict[Phase, list[int]]


class MeasuredStep:
    """Bytes that one run needs on the device, segment by segment, beyond the bytes that were there when it began."""

    def __init__(self, device: Device, run: ForwardPass, start_bytes: int) -> None:
        self._device = device
        self._run = weakref.ref(run)
        self.start_bytes = start_bytes
        self.phase: Phase = "forward"
        self._movable_bytes = 0
        self._need_bytes = 0
        self.peak_bytes = 0
        self.seen_peak_bytes = start_bytes
        self.needs: dict[Phase, list[int]] = {"forward": [], "loss": [], "backward": []}
        # The segment of backward in which each storage was asked for.
        self.asked_in: list[int] = []
        mark_peak(device)

    def is_about(self, run: ForwardPass) -> bool:
        """Whether `run` is being measured."""
        return self._run() is run

    @property
    def is_over(self) -> bool:
        """Whether the measured run has had its backward, or never will."""
        run = self._run()
        return run is None or run.is_over

    def end(self, movable_bytes: int, live_bytes: int) -> None:
        """End the last segment; `live_bytes` are there as the next step begins.

        Later steps begin with the bytes left behind by this one, such as the optimizer's states after the first step.
        """
        left_bytes = max(live_bytes - self.start_bytes, 0)
        self.end_span(movable_bytes, left_bytes=left_bytes)
        self.end_segment("backward")
        self.start_bytes += left_bytes

    def end_span(self, movable_bytes: int, *, left_bytes: int = 0) -> None:
        """End the running part of a segment; `movable_bytes` are there by the engine's choice alone.

        No movable bytes are freed between two calls: bytes there at the start were there at the peak.
        """
        seen_bytes = marked_peak_bytes(self._device) or 0
        self.seen_peak_bytes = max(self.seen_peak_bytes, seen_bytes)
        peak = seen_bytes - self.start_bytes - left_bytes
        self._need_bytes = max(self._need_bytes, peak - min(self._movable_bytes, movable_bytes))
        self.peak_bytes = max(self.peak_bytes, peak)

    def begin_span(self, movable_bytes: int) -> None:
        """Go on in the running segment with `movable_bytes`; originals that waited for their copy may be gone."""
        self._movable_bytes = movable_bytes
        mark_peak(self._device)

    def end_segment(self, phase: Phase) -> None:
        """Begin a segment of `phase`, between two spans."""
        self.needs[self.phase].append(self._need_bytes)
        self.phase, self._need_bytes = phase, 0

    def assume(self, movable_bytes: int) -> None:
        """Assume that `movable_bytes` are there until the running span ends."""
        self._movable_bytes = movable_bytes

    def restart_segment(self, movable_bytes: int) -> None:
        """Restart the running segment."""
        self._need_bytes = 0
        self.begin_span(movable_bytes)


class Headroom:
    """The free memory of one engine, learnt from its first step."""

    def __init__(
        self, device: Device, *, in_flight_bytes: int = ACTIVATIONS_IN_FLIGHT_BYTES, is_ahead: bool = True
    ) -> None:
        """Allow `in_flight_bytes` to wait in any case; without `is_ahead`, one storage at a time comes early."""
        self._device = device
        self._is_ahead = is_ahead
        self._measuring: MeasuredStep | None = None
        self._free: dict[Phase, list[int]] = {"forward": [], "loss": [], "backward": []}
        self._asked_in: list[int] = []
        # Segments of backward that begin with more free memory than the ones before.
        self._rises: frozenset[int] = frozenset()
        self._segment = 0
        self._in_flight_bytes = in_flight_bytes
        self._ceiling_bytes: int | None = None
        self._measured: MeasuredStep | None = None
        self.in_flight = InFlight(device, limit_bytes=2**63 - 1)

    def start_run(self, run: ForwardPass) -> None:
        """Note that a forward begins."""
        self._segment = 0
        live_bytes = device_bytes(self._device)
        if live_bytes is None:
            return
        if self._measuring is not None and self._measuring.is_over and self._measuring.needs["backward"]:
            self._learn(self._measuring, live_bytes)
        if self._measured is None and (self._measuring is None or self._measuring.is_over):
            self._measuring = MeasuredStep(self._device, run, live_bytes)

    def learnt_peaks(self) -> SegmentPeaks | None:
        """Return the most device bytes in each segment of the measured step, or None before it is over."""
        if self._measured is None:
            return None
        start = self._measured.start_bytes
        return {phase: [start + need for need in needs] for phase, needs in self._measured.needs.items()}

    def seen_peak_bytes(self) -> int | None:
        """Return the most device bytes that the measured step had at once, or None before it is over.

        Unlike `learnt_peaks` it takes no bytes left behind by the step for permanent. Gradients of a pending streamed
        update are there at the begin of the next forward, and go while it runs.
        """
        return None if self._measured is None else self._measured.seen_peak_bytes

    def measure_again(self, run: ForwardPass, *, ceiling_bytes: int | None) -> None:
        """Forget the learnt peaks; measure `run`, which begins, and then allow up to `ceiling_bytes` in all.

        Without a ceiling, allow as much as the measured step takes.
        """
        self._ceiling_bytes = ceiling_bytes
        self._measured = self._measuring = None
        self._free = {"forward": [], "loss": [], "backward": []}
        self._asked_in, self._rises = [], frozenset()
        self.start_run(run)

    def hold(self, run: ForwardPass, copied: Event, original: torch.Tensor) -> None:
        """Keep the `original` of a storage of `run` on the device until it is `copied`."""
        with self._letting_go(run):
            self.in_flight.hold(copied, original, original.numel())

    @contextmanager
    def allowing(self, size_bytes: int) -> Iterator[None]:
        """Allow at least `size_bytes` to wait within the context, whatever else is known."""
        before = self._in_flight_bytes
        self._in_flight_bytes = max(before, size_bytes)
        try:
            yield
        finally:
            self._in_flight_bytes = before

    def end_forward_segment(self, run: ForwardPass) -> None:
        """Go on to the next segment of the forward, with only as many copies waiting as it has headroom for."""
        self._segment += 1
        free = self._free["forward"]
        with self._letting_go(run, "forward"):
            self._trim(free[self._segment] if self._segment < len(free) else 0)

    def start_loss(self, run: ForwardPass) -> None:
        """Let originals go before the part of the step after the model's last block."""
        free = self._free["loss"]
        with self._letting_go(run, "loss"):
            self._trim(free[0] if free else 0)

    def let_all_go(self, run: ForwardPass) -> None:
        """Let every original go: the live current stream waits for the copies that are not over."""
        with self._letting_go(run):
            self.in_flight.clear()

    def start_backward(self, run: ForwardPass) -> None:
        """Note that the loss's own backward is over."""
        with self._letting_go(run, "backward"):
            self.in_flight.drain()

    def on_request(self, run: ForwardPass, asked: int, passed: int) -> None:
        """Note that backward asks for the next storage, the end of a segment.

        `asked` storages were asked for before, and backward has gone on `passed` times since.
        """
        if self._rises and passed != self._segment_of(asked + 1, 0) - self._segment_of(asked, 0) - 1:
            # Layers go on more or less often than in the measured step, as where each expert has its own tensors:
            # nothing says any more where in a layer the memory is free.
            self._rises = frozenset()
        self._be_in_backward(run)
        if self._measuring is not None and self._measuring.is_about(run):
            self._measuring.asked_in.append(len(self._measuring.needs["backward"]))
        with self._letting_go(run, "backward"):
            self.in_flight.drain()

    def goes_on(self, run: ForwardPass, asked: int, passed: int) -> bool:
        """Note that backward of `run` goes on in a layer; return whether memory for prefetches has become free.

        `asked` storages were asked for, and backward has gone on `passed` times since.
        """
        if self._measuring is not None and self._measuring.is_about(run):
            self._be_in_backward(run)
            with self._letting_go(run, "backward"):
                return False
        return bool(self._rises) and self._segment_of(asked, passed) in self._rises

    def prefetched(self, run: ForwardPass) -> None:
        """Note that all prefetches of the running segment have been started: their memory is taken."""
        if self._measuring is not None and self._measuring.is_about(run):
            self._measuring.assume(self._movable_bytes(run))

    def restart_segment(self, run: ForwardPass) -> None:
        """Forget the needs of the running segment so far."""
        if self._measuring is not None and self._measuring.is_about(run):
            self._measuring.restart_segment(self._movable_bytes(run))

    def shrink(self, by_bytes: int) -> None:
        """Allow that much less in every segment."""
        self._free = {phase: [free - by_bytes for free in frees] for phase, frees in self._free.items()}

    def free_bytes(self, asked: int, passed: int, last: int) -> int | None:
        """Return how many bytes may be on the device early until storage number `last` is asked for; None if unknown.

        `asked` storages were asked for, and backward has gone on `passed` times in a layer since.
        """
        if not self._is_ahead or last >= len(self._asked_in):
            return None
        end = self._asked_in[last]
        begin = min(self._segment_of(asked, passed), end)
        return min(self._free["backward"][begin : end + 1]) - self.in_flight.size_bytes

    def _segment_of(self, asked: int, passed: int) -> int:
        """Return the running segment of backward; a run that goes on more often is in the last one before a request."""
        before = self._asked_in[asked - 1] + 1 if 0 < asked <= len(self._asked_in) else 0
        if asked < len(self._asked_in):
            return min(before + passed, self._asked_in[asked])
        return before + passed

    def _be_in_backward(self, run: ForwardPass) -> None:
        if self._measuring is not None and self._measuring.phase != "backward":
            # Nobody said when backward began: the segment before is empty.
            self.start_backward(run)

    def _movable_bytes(self, run: ForwardPass) -> int:
        return self.in_flight.size_bytes + run.ahead_bytes

    def _trim(self, free_bytes: int) -> None:
        self.in_flight.trim(max(free_bytes, self._in_flight_bytes))

    @contextmanager
    def _letting_go(self, run: ForwardPass, phase: Phase | None = None) -> Iterator[None]:
        """Surround code that lets originals go after their copies; with a `phase` a segment of it begins.

        One span ends before the code and another begins after it, since these originals are only in the first.
        """
        measuring = self._measuring
        if measuring is None or not measuring.is_about(run):
            yield
            return
        measuring.end_span(self._movable_bytes(run))
        yield
        if phase is not None:
            measuring.end_segment(phase)
        measuring.begin_span(self._movable_bytes(run))

    def _learn(self, step: MeasuredStep, live_bytes: int) -> None:
        step.end(self.in_flight.size_bytes, live_bytes)
        top_bytes = step.peak_bytes
        if self._ceiling_bytes is not None:
            top_bytes = self._ceiling_bytes - step.start_bytes
        self._free = {phase: [top_bytes - need for need in needs] for phase, needs in step.needs.items()}
        self._asked_in, self._rises = step.asked_in, _falls(step.needs["backward"])
        self._measured, self._measuring = step, None


def _falls(needs: Sequence[int]) -> frozenset[int]:
    """Return the places where `needs` are lower by a sixteenth of their range than at the place or peak before."""
    least_bytes = (max(needs, default=0) - min(needs, default=0)) // 16
    found, level = [], 0
    for place, need in enumerate(needs):
        if need < level - least_bytes:
            found.append(place)
            level = need
        level = max(level, need)
    return frozenset(found)
