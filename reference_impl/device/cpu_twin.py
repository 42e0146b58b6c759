# SPDX-License-Identifier: Apache-2.0
"""The CPU twin: the same engine without a GPU.

It makes the same copies between two tiers of ordinary memory, at once, so that values, lifetime and memory can be
tested on any machine. The ledger counts its bytes.

Explained in docs/design.md (decision 5).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from reference_impl.device.base import REACHED, Device, Event, Mark


class HostTime(float):
    """A mark of the twin: seconds of the host's clock."""

    __slots__ = ()

    def seconds_until(self, later: float) -> float:
        """Return the difference."""
        return later - self


class CpuTwin(Device, torch_type="cpu"):
    """Copies are over when the call returns; there is one stream, and nothing to pin."""

    is_accelerator = False
    compiles = False
    pins_host_memory = False

    @classmethod
    def count(cls) -> int:
        """Return 1."""
        return 1

    @property
    def name(self) -> str:
        """That this is the twin."""
        return "CPU twin"

    @property
    def allocator(self) -> None:
        """None: the ledger watches every operation instead."""
        return None

    def use_in_thread(self) -> None:
        """Do nothing."""

    def current_stream_id(self) -> int:
        """Return 0: there is one."""
        return 0

    def current_stream(self) -> None:
        """Return None: there is one."""

    def record(self, *, for_threads: bool = False) -> Event:
        """Return an event that is reached already."""
        return REACHED

    def mark(self) -> Mark:
        """Read the host's clock."""
        return HostTime(time.perf_counter())

    def wait(self, event: Event) -> None:
        """Return at once."""

    def on_d2h(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_d2h_for_threads(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_h2d(self, size_bytes: int = 0) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_h2d_of_weights(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_update_stream(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on_decompression_stream(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def finish_work(self) -> None:
        """Return at once."""

    @property
    def is_capturing(self) -> bool:
        """Nothing here can be captured."""
        return False

    def refuse_capture(self, caller: str) -> None:
        """Return: there is nothing to capture."""

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing: copies are immediate."""

    def unpin(self, address: int) -> None:
        """Do nothing."""
