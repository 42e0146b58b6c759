# SPDX-License-Identifier: Apache-2.0
"""A worker that carries out tasks as late as the waits allow: only once somebody waits for one, or for one behind it.

In the place of the ring's, it leaves pageable memory unwritten for as long as that is allowed, so whoever reads such
memory without waiting reads old bytes, every time.
"""

import threading
from collections import deque
from concurrent.futures import Future


class LateWorker:
    """`memory.worker.Worker` without a thread."""

    def __init__(self, name):
        self._lock = threading.RLock()
        self._tasks = deque()

    def submit(self, task):
        future = Future()
        with self._lock:
            self._tasks.append((task, future))
        return future

    def wait(self, future, *, deadline_s):
        with self._lock:
            while not future.done():
                task, own = self._tasks.popleft()
                own.set_result(task())
            return future.result()

    def close(self):
        assert not self._tasks
