# SPDX-License-Identifier: Apache-2.0
"""When everything happens, on a device that counts time instead of spending it.

Each stream has a clock; a copy takes as long as its bytes do at the link's rate, and an event is the time at which its
stream recorded it. The numbers are those of 1.364e9 parameters on one H200: 163 chunks of 2.05 ms each way.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from reference_impl.device import CpuTwin
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.update import ChunkUpdate

CHUNK = 64
CHUNK_BYTES = 12 * CHUNK
LAYERS, CHUNKS_A_LAYER = 24, 7
COPY_MS = 2.0
LINK_MS = LAYERS * CHUNKS_A_LAYER * COPY_MS
GROUPS = [dict(Adam().defaults)]


@dataclass
class Moment:
    """An event: reached once the host's clock has come to it."""

    device: "Clocks"
    time: float

    def query(self):
        return self.time <= self.device.host

    def synchronize(self):
        self.device.host = max(self.device.host, self.time)


class Clocks(CpuTwin):
    """Streams as clocks, in milliseconds; `host` is how far the host knows the compute stream to be."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = dict.fromkeys(("compute", "update", "h2d", "d2h"), 0.0)
        self.stream = "compute"
        self.host = 0.0

    def current_stream(self):
        return self.stream

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def work(self, duration):
        self.now[self.stream] += duration

    def record(self, *, for_threads=False):
        return Moment(self, self.now[self.stream])

    def wait(self, event):
        if isinstance(event, Moment):
            self.now[self.stream] = max(self.now[self.stream], event.time)

    def on_d2h(self, size_bytes=0):
        return self.on("d2h")

    def on_h2d(self, size_bytes=0):
        return self.on("h2d")

    def on_update_stream(self):
        return self.on("update")

    def copy_out(self, host, source, *, after, for_threads=False):
        return self._copy("d2h", host, source, after)

    def copy_in(self, target, host, *, after):
        return self._copy("h2d", target, host, after)

    def _copy(self, stream, target, source, after):
        with self.on(stream):
            for event in after:
                self.wait(event)
            target.copy_(source)
            self.work(COPY_MS * source.nbytes / CHUNK_BYTES)
            return self.record()


@pytest.fixture
def clocks(monkeypatch):
    device = Clocks()
    run = ChunkUpdate.run

    def timed(self, *arguments):
        run(self, *arguments)
        # Little to compute, but three kernels that wait for their turn beside the forward's.
        device.work(0.3)

    monkeypatch.setattr(ChunkUpdate, "run", timed)
    return device


def steady_step_ms(device, *, forward_ms, backward_ms, extra, host_follows=True):
    """Return the time of a step once all steps are alike, and the most chunks on the device at a forward's end."""
    params = [torch.zeros(CHUNK * CHUNKS_A_LAYER, dtype=torch.bfloat16) for _ in range(LAYERS)]
    members = [Member(param, 0, order, resident=0) for order, param in enumerate(params)]
    share = StreamedShare(
        device, Adam(), chunk_bytes=CHUNK_BYTES, device_budget_bytes=(3 + extra) * CHUNK_BYTES + 4 * CHUNK
    )
    share.add({member: Part(range(member.param.numel())) for member in members})
    ends, held = [], []
    for _ in range(6):
        for member in members:
            share.wait_for([member])
            device.work(forward_ms / LAYERS)
            device.host = device.now["compute"] if host_follows else 0.0
        held.append(share.extra_bytes // CHUNK_BYTES)
        for member in reversed(members):
            device.work(backward_ms / LAYERS)
            device.host = device.now["compute"] if host_follows else 0.0
            share.on_gradient(member)
        share.update({member: torch.ones_like(member.param) for member in members}, None, GROUPS)
        ends.append(device.now["compute"])
    share.close()
    steps = [end - begin for begin, end in pairwise(ends)]
    assert steps[-1] == pytest.approx(steps[-2], rel=0.01)
    return steps[-1], held[-1]


@pytest.mark.parametrize(("forward_ms", "backward_ms"), [(44, 88), (176, 352)])
def test_three_slots_are_bound_by_the_link_until_the_last_weight(clocks, forward_ms, backward_ms):
    step_ms, held = steady_step_ms(clocks, forward_ms=forward_ms, backward_ms=backward_ms, extra=0)
    assert step_ms == pytest.approx(max(LINK_MS, forward_ms) + backward_ms, rel=0.02)
    assert held == 0


@pytest.mark.parametrize("host_follows", [True, False])
def test_enough_extra_slots_hide_the_update_behind_forward_and_backward(clocks, host_follows):
    """Extra slots have to hold the states that forward has no time to send: `LINK_MS - forward_ms`, and a few.

    Also when the host runs so far ahead that it never sees a copy's end, and no slot is given back in time.
    """
    extra = round((LINK_MS - 176) / COPY_MS) + 4
    step_ms, held = steady_step_ms(
        clocks, forward_ms=176, backward_ms=352, extra=extra, host_follows=host_follows
    )
    assert step_ms <= 1.02 * (176 + 352)
    # More would not be given back by the end of forward either: the link is busy until then.
    assert held <= extra


def test_both_ways_begin_at_once_however_many_chunks_came_early(clocks):
    """A slot takes the next chunk that is to come as soon as its own is queued out, not when that one's turn is."""
    param = torch.zeros(CHUNK * 100, dtype=torch.bfloat16)
    member = Member(param, 0, 0, resident=0)
    share = StreamedShare(
        clocks, Adam(), chunk_bytes=CHUNK_BYTES, device_budget_bytes=83 * CHUNK_BYTES + 4 * CHUNK
    )
    share.add({member: Part(range(param.numel()))})
    for _ in range(2):
        share.on_gradient(member)
        begun = max(clocks.now.values())
        clocks.now = dict.fromkeys(clocks.now, begun)
        share.update({member: torch.ones_like(param)}, None, GROUPS)
        # 80 are there; nobody has waited for a weight yet, and the other 20 are on their way already.
        arrive_ms = clocks.now["h2d"] - begun
        share.wait_for([member])
    share.close()
    assert arrive_ms == pytest.approx(20 * COPY_MS, rel=0.1)


def test_extra_slots_are_freed_before_the_end_of_a_long_forward(clocks):
    step_ms, held = steady_step_ms(clocks, forward_ms=1.1 * LINK_MS, backward_ms=2 * LINK_MS, extra=40)
    assert step_ms == pytest.approx(3.1 * LINK_MS, rel=0.02)
    assert held == 0


@pytest.mark.parametrize("extra", [60, 80, 1000])
def test_a_short_backward_brings_in_what_it_has_time_for(clocks, extra):
    """Every step, whatever the number: no copy in waits behind one into a slot that becomes free late."""
    step_ms, _ = steady_step_ms(clocks, forward_ms=44, backward_ms=88, extra=extra)
    in_backward = 88 * (1 - 1 / LAYERS)
    assert step_ms == pytest.approx(LINK_MS - in_backward + 88, rel=0.03)
