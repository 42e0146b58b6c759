# SPDX-License-Identifier: Apache-2.0
"""One forward or backward at a time uses the visiting blocks: a reading thread waits for the training one.

A turn is one block's forward, or a whole backward: it goes from block to block and may compute forwards again. Work of
a turn on another stream than that of the one before runs behind it.

Explained in docs/reliability.md.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
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
    """The turns of all blocks of one model on `device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Held for a few lines; no finalizer waits for it.
        self._lock = UninterruptedLock()
        # The thread in a block's forward, and the running backwards, one inside another, by the last call of each.
        # Only its graph keeps this call: after a failed backward it is gone.
        self._forward: int | None = None
        self._backwards: dict[int, weakref.ref[functools.partial[Any]]] = {}
        # Thread and stream of the last turn.
        self._last_thread: int | None = None
        self._last_stream: Any = None
        self._waiting = 0

    def begin_forward(self) -> None:
        """Wait for the turn of a block's forward; in a backward, which computes it again, it is there.

        Raises RuntimeError where the turn does not come.
        """
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._take(self._try_forward, self._drop_forward)

    def end_forward(self) -> None:
        """Give the turn of a forward back. Without one, as of a second call, it does nothing."""
        if torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._drop_forward()
            if self._waiting:
                # A waiter would be late each time.
                time.sleep(2 * _SLICE_S)

    def begin_backward(self) -> None:
        """Wait for the turn of the running backward, unless it has it; at its end or failure it gives the turn back."""
        task = torch._C._current_graph_task_id()
        if task == _NO_BACKWARD or task in self._backwards:
            return
        self._take(lambda: self._try_backward(task), lambda: self._backwards.pop(task, None))

    def _take(self, try_to: Callable[[], bool], give_back: Callable[[], object]) -> None:
        try:
            if not try_to():
                self._wait(try_to)
            thread = threading.get_ident()
            if thread != self._last_thread:
                self._hand_over(thread)
        except BaseException:
            give_back()
            raise

    def _try_forward(self) -> bool:
        me = threading.get_ident()
        with self._lock:
            # An interrupted forward has not given it back.
            if self._is_in_backward() or self._forward not in (None, me):
                return False
            self._forward = me
            return True

    def _drop_forward(self) -> None:
        # No other thread takes it from this one, so nothing comes between the two lines.
        if self._forward == threading.get_ident():
            self._forward = None

    def _try_backward(self, task: int) -> bool:
        with self._lock:
            if self._forward not in (None, threading.get_ident()):
                return False
            self._forward = None
            # An error that is kept, as a notebook's last one, keeps its frames, so none may keep the last call.
            end: functools.partial[Any] = functools.partial(self._backwards.pop, task, None)
            self._backwards[task] = weakref.ref(end)
        # Behind all that the backward calls at its end.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(functools.partial(queue, end))
        return True

    def _is_in_backward(self) -> bool:
        for task, end in list(self._backwards.items()):
            if end() is None:
                self._backwards.pop(task, None)
        return bool(self._backwards)

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
