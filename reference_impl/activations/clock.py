"""Times on the device: CUDA events on the live current stream, or the host's clock on the CPU twin."""

from __future__ import annotations

import time

import torch

from reference_impl.device import Device

Mark = torch.cuda.Event | float


class Clock:
    """Marks points in the work of a device; the time between two is read later."""

    def __init__(self, device: Device) -> None:
        """Mark nothing yet."""
        self._device = device

    def mark(self) -> Mark:
        """Mark the end of what the live current stream has been given so far."""
        if not self._device.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device.torch_device))
        return event

    @staticmethod
    def seconds(began: Mark, ended: Mark) -> float:
        """Return the time between two marks; waits until the second is reached."""
        if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began


class ComputeClock:
    """Counts the time of computation alone: stopped while the engine makes the device wait."""

    def __init__(self, clock: Clock) -> None:
        """Stand still at 0."""
        self._clock = clock
        self._intervals: list[tuple[Mark, Mark]] = []
        self._began: Mark | None = None

    def start(self) -> None:
        """Go on."""
        self._began = self._clock.mark()

    def stop(self) -> int:
        """Stand still; return the reading, which `seconds` turns into time."""
        if self._began is not None:
            self._intervals.append((self._began, self._clock.mark()))
            self._began = None
        return len(self._intervals)

    def seconds(self) -> list[float]:
        """Return the time at each reading, from 0."""
        times = [0.0]
        for began, ended in self._intervals:
            times.append(times[-1] + Clock.seconds(began, ended))
        return times
