# SPDX-License-Identifier: Apache-2.0
"""One forward or backward at a time uses the blocks that visit: a thread that only reads waits for the one that trains.

A turn is one block's forward, or a whole backward, which goes from block to block and may compute forwards again. Work
of a turn on another stream than that of the one before runs behind it.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from reference_impl.device import Device
from reference_impl.memory.interrupts import UninterruptedLock

_NO_BACKWARD = -1
_SLICE_S = 0.001
# A forward of one block, or a backward, that takes longer is gone.
_DEADLINE_S = 600.0


class Turns:
    """The turns of all blocks of one model, which is on `device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Held for a few lines; no finalizer waits for it.
        self._lock = UninterruptedLock()
        # The thread in a block's forward, and the backwards that run, one inside another.
        self._forward: int | None = None
        self._backwards: set[int] = set()
        # Who had the last turn, where.
        self._last_thread: int | None = None
        self._last_stream: Any = None
        self._waiting = 0

    def begin_forward(self) -> None:
        """Wait for the turn of a block's forward; in a backward, which computes it again, it is there.

        Raises RuntimeError where the turn does not come.
        """
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._take(self._try_forward)

    def end_forward(self) -> None:
        """Give the turn of a forward back. Again, it does nothing."""
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._forward = None
            if self._waiting:
                # Whoever waits would be late each time.
                time.sleep(2 * _SLICE_S)

    def begin_backward(self) -> None:
        """Wait for the turn of the backward that runs, unless it has it; where that ends or fails, it gives it back."""
        task = torch._C._current_graph_task_id()
        if task == _NO_BACKWARD or task in self._backwards:
            return
        # Made first: whatever fails from here on drops it.
        end = _BackwardEnd(self._backwards, task)
        self._take(lambda: self._try_backward(task))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _take(self, try_to: Callable[[], bool]) -> None:
        if not try_to():
            self._wait(try_to)
        thread = threading.get_ident()
        if thread != self._last_thread:
            self._hand_over(thread)

    def _try_forward(self) -> bool:
        me = threading.get_ident()
        with self._lock:
            # An interrupted forward has not given it back.
            if self._backwards or self._forward not in (None, me):
                return False
            self._forward = me
            return True

    def _try_backward(self, task: int) -> bool:
        with self._lock:
            if self._forward not in (None, threading.get_ident()):
                return False
            self._forward = None
            self._backwards.add(task)
            return True

    def _wait(self, try_to: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        self._waiting += 1
        try:
            while not try_to():
                time.sleep(_SLICE_S)
                if not any(thread.ident == self._forward for thread in threading.enumerate()):
                    self._forward = None
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"another thread's forward or backward has used streamed layers for {_DEADLINE_S:.0f} s; "
                        "expected one at a time, each of which ends; try running the model in one thread"
                    )
        finally:
            self._waiting -= 1

    def _hand_over(self, thread: int) -> None:
        """Let later work of the live current stream run behind the work of the last turn on its own."""
        before, stream = self._last_stream, self._device.current_stream()
        if before is not None and before != stream:
            with self._device.on(before):
                given = self._device.record()
            self._device.wait(given)
        self._last_thread, self._last_stream = thread, stream


class _BackwardEnd:
    """Gives the turn of a backward back behind all that it calls at its end, or when it is dropped, having failed."""

    def __init__(self, backwards: set[int], task: int) -> None:
        self._backwards = backwards
        self._task = task
        self._is_last = False

    def __call__(self) -> None:
        if self._is_last:
            self._backwards.discard(self._task)
        else:
            self._is_last = True
            torch.autograd.Variable._execution_engine.queue_callback(self)

    def __del__(self) -> None:
        self._backwards.discard(self._task)
