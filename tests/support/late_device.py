# SPDX-License-Identifier: Apache-2.0
"""A CPU twin whose copies are made as late as the waits allow, or earlier, at random.

Each copy stream is a queue. Its operations happen when somebody waits for it, directly or through another stream, and
sometimes before. So whoever reads, writes or frees memory that a copy still uses gets wrong values here, as on a GPU.
Kernels are not late: their streams reach every awaited event at once.
"""

import random
import threading
from collections import deque
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import increment_version

from reference_impl.device import REACHED, CpuTwin, EventGroup

COPY_STREAMS = ("h2d", "d2h", "gradients", "weights", "decompression")


def _places(*tensors):
    """The address of each tensor's memory, and its size: both change as a storage is resized."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


class Late:
    """An event: the operations of a copy stream when it was recorded."""

    def __init__(self, device, stream, count):
        self.device, self.stream, self.count = device, stream, count

    def query(self):
        self.device.go_on()
        return self.device.done[self.stream] >= self.count

    def synchronize(self):
        self.device.reach(self)


class LateTwin(CpuTwin):
    """One device a process; `seed` decides which copies are early."""

    seed = 0

    def __init__(self, torch_device):
        super().__init__(torch_device)
        self.random = random.Random(self.seed)
        self.queues = {name: deque() for name in COPY_STREAMS}
        self.given = dict.fromkeys(COPY_STREAMS, 0)
        self.done = dict.fromkeys(COPY_STREAMS, 0)
        # Threads of an optimizer ask for events and give work too.
        self.lock = threading.RLock()
        self.of_thread = threading.local()

    @property
    def live(self):
        return getattr(self.of_thread, "live", "kernels")

    @contextmanager
    def on(self, stream):
        before, self.of_thread.live = self.live, stream if stream in COPY_STREAMS else "kernels"
        try:
            yield
        finally:
            self.of_thread.live = before

    def on_d2h(self, size_bytes=0):
        return self.on("d2h")

    def on_d2h_for_threads(self):
        return self.on("gradients")

    def on_h2d(self, size_bytes=0):
        return self.on("h2d")

    def on_h2d_of_weights(self):
        return self.on("weights")

    def on_decompression_stream(self):
        return self.on("decompression")

    def on_update_stream(self):
        return self.on("kernels")

    def copy(self, target, source):
        places = _places(target, source)

        def land():
            assert _places(target, source) == places, "memory was freed that a copy still uses"
            # It was asked for outside of all transforms of torch.func, and has counted as a write then.
            with (
                temporarily_clear_interpreter_stack(),
                torch.autograd._unsafe_preserve_version_counter(target),
            ):
                target.copy_(source)

        if not target.is_inference():
            increment_version(target)
        self.do(land)
        return REACHED

    def copy_out(self, host, source, *, after, for_threads=False):
        with self.on_d2h_for_threads() if for_threads else self.on_d2h():
            return self.copied(host, source, after)

    def copy_in(self, target, host, *, after):
        with self.on_h2d():
            return self.copied(target, host, after)

    def copied(self, target, source, after):
        for event in after:
            self.wait(event)
        self.copy(target, source)
        return self.record()

    def do(self, work):
        """Do `work` on the live stream."""
        if self.live == "kernels":
            work()
            return
        with self.lock:
            self.queues[self.live].append(work)
            self.given[self.live] += 1
            self.go_on()

    def record(self, *, for_threads=False):
        return REACHED if self.live == "kernels" else Late(self, self.live, self.given[self.live])

    def wait(self, event):
        for each in event.events if isinstance(event, EventGroup) else (event,):
            if each is not REACHED:
                self.do(lambda event=each: self.reach(event))

    def reach(self, event):
        """Do all that comes before `event`."""
        with self.lock:
            while self.done[event.stream] < event.count:
                self.do_next(event.stream)

    def do_next(self, stream):
        # Inference tensors and gradients are as they were where the copy was asked for.
        with torch.no_grad():
            self.queues[stream].popleft()()
        self.done[stream] += 1

    def go_on(self):
        """Let one stream do one thing, half of the times."""
        with self.lock:
            stream = self.random.choice(COPY_STREAMS)
            if self.queues[stream] and self.random.random() < 0.5:
                self.do_next(stream)

    def synchronize(self):
        for stream in COPY_STREAMS:
            self.reach(Late(self, stream, self.given[stream]))
