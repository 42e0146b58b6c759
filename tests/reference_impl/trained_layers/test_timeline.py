# SPDX-License-Identifier: Apache-2.0
"""When everything happens, on a device that counts time, and whether anybody is ever too early.

Each stream has a clock, a copy takes as long as its bytes do at the link's rate, and each byte range remembers when it
was last read and written. Whoever reads before the last write has ended, writes before the last read has, or frees
before both, would be wrong on a GPU: here it is found, though every copy is made at once.
"""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from live_stream import LiveStream
from torch import nn

from reference_impl import TrainableLayerStreamer
from reference_impl.device import REACHED, CpuTwin, Device
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.share import CpuShare
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.options import CpuUpdate, Streaming
from reference_impl.optimizers.streamed.update import ChunkUpdate
from reference_impl.weights import block as streamed_block

WIDTH, LAYERS = 32, 8
LAYER_BYTES = 2 * WIDTH * WIDTH
# Of a layer's bf16 weights over the link.
LAYER_MS = 4.0


class Moment:
    """An event: a time of the device."""

    def __init__(self, device, time):
        self.device, self.time = device, time

    def query(self):
        return self.time <= self.device.host

    def synchronize(self):
        self.device.host = max(self.device.host, self.time)
        self.device.issued = max(self.device.issued, self.time)


class Ranges:
    """Byte ranges of memory, each with the end of its last write and of its last read, by the pages they lie in."""

    def __init__(self):
        self._known = defaultdict(dict)
        self.hazards = []

    def use(self, what, begin, end, *, reads=(), writes=()):
        for tensor in reads:
            self._check(what, tensor, begin, end, writes=False)
        for tensor in writes:
            self._check(what, tensor, begin, end, writes=True)

    def free(self, what, storage, now):
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for known in self._pages(start, stop):
            for span, ends in [*known.items()]:
                if span[0] < stop and start < span[1]:
                    if max(ends) > now + 1e-9:
                        self.hazards.append(f"{what} at {now}, in use until {max(ends)}")
                    del known[span]

    def _check(self, what, tensor, begin, end, *, writes):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for known in self._pages(start, stop):
            for span, (written, read) in known.items():
                if span[0] < stop and start < span[1]:
                    until = max(written, read) if writes else written
                    if begin < until - 1e-9:
                        kind = "writes" if writes else "reads"
                        self.hazards.append(f"{what} {kind} at {begin}, in use until {until}")
            written, read = known.get((start, stop), (0.0, 0.0))
            known[start, stop] = (max(written, end), read) if writes else (written, max(read, end))

    def _pages(self, start, stop):
        return [self._known[page] for page in range(start >> 12, ((stop - 1) >> 12) + 1)]


class Clocks(LiveStream, CpuTwin):
    """Streams as clocks, in milliseconds."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = dict.fromkeys(("compute", "update", "h2d", "d2h", "weights"), 0.0)
        self.stream = "compute"
        # How far the host knows the compute stream to be, and when it last stopped waiting: nothing begins before.
        self.host = self.issued = 0.0
        self.ranges = Ranges()
        self.copied = {"h2d": 0, "d2h": 0, "weights": 0}
        self.update_ms = 0.01

    def run(self, what, duration, *, reads=(), writes=()):
        begin = max(self.now[self.stream], self.issued)
        self.now[self.stream] = begin + duration
        self.ranges.use(f"{what} on {self.stream}", begin, self.now[self.stream], reads=reads, writes=writes)

    def record(self, *, for_threads=False):
        return Moment(self, self.now[self.stream])

    def wait(self, event):
        if event is not REACHED:
            self.now[self.stream] = max(self.now[self.stream], event.time)

    def on_d2h(self, size_bytes=0):
        return self.on("d2h")

    def on_d2h_for_threads(self):
        return self.on("d2h")

    def on_h2d(self, size_bytes=0):
        return self.on("h2d")

    def on_h2d_of_weights(self):
        # Its copies are short, and that others are slower beside them is not counted.
        return self.on("weights")

    def on_update_stream(self):
        return self.on("update")

    def copy(self, target, source):
        target.copy_(source)
        self.run("a copy", LAYER_MS * source.nbytes / LAYER_BYTES, reads=[source], writes=[target])
        self.copied[self.stream] = self.copied.get(self.stream, 0) + source.nbytes
        return REACHED

    def copy_out(self, host, source, *, after, for_threads=False):
        return self._copy("d2h", host, source, after)

    def copy_in(self, target, host, *, after):
        return self._copy("h2d", target, host, after)

    def _copy(self, stream, target, source, after):
        with self.on(stream):
            for event in after:
                self.wait(event)
            self.copy(target, source)
            return self.record()


@pytest.fixture
def clocks(monkeypatch):
    device = Clocks()
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    run, resize = ChunkUpdate.run, streamed_block.resize_storage

    def timed(self, chunk, buffer, step, numbers, came_in=None):
        run(self, chunk, buffer, step, numbers, came_in)
        written = [step.weights.of(piece) for piece in chunk.pieces]
        read = [step.gradient(piece) for piece in chunk.pieces] if came_in is None else [came_in]
        device.run("an update", device.update_ms, reads=read, writes=[buffer, *written])

    def resized(storage, size_bytes):
        if size_bytes == 0 and storage.nbytes():
            device.ranges.free("freed", storage, device.now["compute"])
        resize(storage, size_bytes)

    monkeypatch.setattr(ChunkUpdate, "run", timed)
    monkeypatch.setattr(streamed_block, "resize_storage", resized)
    return device


class Timed(torch.autograd.Function):
    """A product that takes its time: once in forward, twice in backward."""

    @staticmethod
    def forward(ctx, x, weight, device, duration):
        ctx.save_for_backward(x, weight)
        ctx.device, ctx.duration = device, duration
        device.run("forward", duration, reads=[weight])
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.device.run("backward", 2 * ctx.duration, reads=[weight])
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None, None


class Layer(nn.Module):
    def __init__(self, device, duration, parts):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / 8
        self.weights = nn.ParameterList(part.clone() for part in weight.chunk(parts))
        self.device, self.duration = device, duration / parts

    def forward(self, x):
        return x + torch.tanh(
            torch.cat([Timed.apply(x, part, self.device, self.duration) for part in self.weights], -1)
        )


class Stack(nn.Module):
    def __init__(self, device, duration, parts):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(device, duration, parts) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def steady_step_ms(
    device,
    *,
    forward_ms,
    prefetch=2,
    slices=1,
    parts=1,
    split=(0.0, 1.0, 0.0),
    max_grad_norm=1.0,
    backward_overlap="gradients",
    **form,
):
    """Return the time of a step once steps are alike, and the bytes that it copied in and out."""
    model = Stack(device, forward_ms / slices, parts)
    wrapped = torch.optim.AdamW(model.parameters(), fused=True)
    streaming = Streaming(chunk_bytes=12 * 128, **form)
    ends, copied = [], []
    with TrainableLayerStreamer(
        model,
        wrapped,
        max_grad_norm=max_grad_norm,
        backward_overlap=backward_overlap,
        streaming=streaming,
        prefetch=prefetch,
        slices=slices,
        split=split,
        cpu=CpuUpdate(bucket_elements=WIDTH**2) if split[2] else None,
    ) as streamer:
        for _ in range(6):
            model(torch.ones(2, 4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            streamer.optimizer.step()
            streamer.optimizer.zero_grad()
            device.host = device.now["compute"]
            ends.append(device.now["compute"])
            copied.append(dict(device.copied))
        assert streamer.report.weights.late_loads == 0 or prefetch == 0
    assert not device.ranges.hazards, device.ranges.hazards[:5]
    steps = [end - begin for begin, end in pairwise(ends)]
    assert steps[-1] == pytest.approx(steps[-2], rel=0.01)
    return steps[-1], {way: copied[-1][way] - copied[-2][way] for way in ("h2d", "d2h", "weights")}


# In bytes a parameter: the traffic beside the weights in forward, for states of so many bytes.
@pytest.mark.parametrize("forward_ms", [2.0, 40.0], ids=["short", "long"])
@pytest.mark.parametrize(
    ("state_bytes", "form"),
    [(10, {}), pytest.param(6, {"states": "bf16-moments"}, marks=pytest.mark.slow)],
    ids=["exact", "bf16 moments"],
)
def test_the_update_hides_behind_forward_and_weights_behind_backward(clocks, forward_ms, state_bytes, form):
    step_ms, copied = steady_step_ms(clocks, forward_ms=forward_ms, **form)
    params = LAYERS * WIDTH * WIDTH
    # Weights come twice a step less the window's at both turns; states and gradients once.
    assert copied["h2d"] == (2 * (LAYERS - 3) * 2 + LAYERS * (state_bytes + 2)) * WIDTH * WIDTH
    assert copied["d2h"] == params * (state_bytes + 2 + 2)
    layer_ms = LAYER_MS / 2
    forward = max(LAYERS * forward_ms, layer_ms * (LAYERS * (state_bytes + 2) + (LAYERS - 3) * 2))
    backward = max(3 * LAYERS * forward_ms, layer_ms * LAYERS * 2)
    # The first chunk and the last gradient have nothing to hide behind.
    exposed = layer_ms * (state_bytes + 2)
    assert forward + backward <= step_ms <= 1.03 * (forward + backward) + exposed


@pytest.fixture
def cpu(clocks, monkeypatch):
    """Workers that update by the clocks: one thread, so many ms a layer."""
    thread = SimpleNamespace(layer_ms=0.0, now=0.0, done={})
    release, share = Publisher.release, CpuShare.run_task

    def submit(workers, jobs):
        for job in sorted(jobs, key=lambda job: job.deadline):
            thread.now = max(thread.now, job.arrival.time)
            job.run()

    def run_task(cpu_share, task, update):
        thread.now += thread.layer_ms
        share(cpu_share, task, update)

    def released(publisher, member):
        thread.done[publisher.flag(member)] = thread.now
        release(publisher, member)

    def wait_until(workers, flag):
        clocks.host = max(clocks.host, thread.done[flag])
        clocks.issued = max(clocks.issued, thread.done[flag])

    monkeypatch.setattr(DeadlineWorkers, "submit", submit)
    monkeypatch.setattr(DeadlineWorkers, "wait_until", wait_until)
    monkeypatch.setattr(CpuShare, "run_task", run_task)
    monkeypatch.setattr(Publisher, "release", released)
    return thread


@pytest.mark.parametrize("forward_ms", [2.0, 24.0], ids=["short", "long"])
@pytest.mark.parametrize("layer_ms", [1.0, 25.0, 60.0], ids=["fast", "even", "slow"])
def test_the_cpu_updates_beside_the_link(clocks, cpu, forward_ms, layer_ms):
    cpu.layer_ms = layer_ms
    step_ms, copied = steady_step_ms(clocks, forward_ms=forward_ms, split=(0.0, 0.5, 0.5))
    params = LAYERS * WIDTH * WIDTH
    # With the two numbers of the clip decision.
    assert copied["d2h"] == params * (2 + (10 + 2) / 2) + 8
    assert copied["weights"] == params * 2 / 2
    link_ms = LAYER_MS / 2
    # Every other layer's weight comes twice, the others' with gradient and states.
    inwards = LAYERS * (10 + 2) / 2 + LAYERS * 2 / 2 + (LAYERS - 3) * 2
    forward = max(LAYERS * forward_ms, link_ms * inwards, layer_ms * LAYERS / 2)
    backward = max(3 * LAYERS * forward_ms, link_ms * LAYERS * 2)
    exposed = link_ms * (10 + 2) + layer_ms
    assert forward + backward - exposed <= step_ms <= 1.03 * (forward + backward) + exposed


@pytest.mark.parametrize("forward_ms", [2.0, 24.0], ids=["short", "long"])
@pytest.mark.parametrize(("share", "parts"), [(0.5, 1), (0.25, 8), (0.5, 8), (0.75, 8)])
def test_states_that_stay_spare_the_link_all_along(clocks, forward_ms, share, parts):
    # A fifth of the link's time for its states and gradient.
    clocks.update_ms = 0.2 * LAYER_MS * 12 / 2 / 8
    step_ms, copied = steady_step_ms(
        clocks, forward_ms=forward_ms, parts=parts, split=(share, 1 - share, 0.0)
    )
    params, state_bytes = LAYERS * WIDTH * WIDTH, 10 * (1 - share)
    assert copied["d2h"] == params * (state_bytes + 2 + 2)
    layer_ms = LAYER_MS / 2
    forward = max(LAYERS * forward_ms, layer_ms * (LAYERS * (state_bytes + 2) + (LAYERS - 3) * 2))
    backward = max(3 * LAYERS * forward_ms, layer_ms * LAYERS * 2)
    # A layer's states, gradient and weight have nothing to hide behind, nor have two updates, nor an eighth of its
    # states, which comes into memory of backward.
    exposed = layer_ms * (10 + 2 + 2) + 2 * clocks.update_ms + layer_ms * 10 / 8
    assert forward + backward - exposed <= step_ms <= 1.03 * (forward + backward) + exposed


@pytest.mark.parametrize("forward_ms", [2.0, 24.0], ids=["short", "long"])
@pytest.mark.parametrize(
    ("state_bytes", "form"),
    [(10, {}), pytest.param(6, {"states": "bf16-moments"}, marks=pytest.mark.slow)],
    ids=["exact", "bf16 moments"],
)
def test_without_clipping_the_update_hides_behind_backward(clocks, forward_ms, state_bytes, form):
    step_ms, copied = steady_step_ms(
        clocks, forward_ms=forward_ms, max_grad_norm=None, backward_overlap="update", **form
    )
    params = LAYERS * WIDTH * WIDTH
    # No gradient leaves. The window of three keeps a fourth that it has passed, at both turns.
    assert copied["d2h"] == params * (state_bytes + 2)
    assert copied["h2d"] == (2 * (LAYERS - 4) * 2 + LAYERS * state_bytes) * WIDTH * WIDTH
    layer_ms = LAYER_MS / 2
    forward = max(LAYERS * forward_ms, layer_ms * LAYERS * 2)
    backward = max(3 * LAYERS * forward_ms, layer_ms * LAYERS * (state_bytes + 2))
    # The update of the first block has nothing to hide behind; the window's weights do not travel.
    exposed, kept = layer_ms * (state_bytes + 2), layer_ms * 4 * 2
    assert 0.97 * (forward + backward) - kept <= step_ms <= 1.03 * (forward + backward) + exposed


@pytest.mark.slow
def test_backward_never_waits_for_the_update_that_it_has_just_started(clocks, monkeypatch):
    """Of the blocks behind backward, the one updated longest ago goes, however long until each is needed."""
    layers, forward_ms = 20, 12.0
    monkeypatch.setitem(globals(), "LAYERS", layers)
    step_ms, _ = steady_step_ms(clocks, forward_ms=forward_ms, max_grad_norm=None, backward_overlap="update")
    # A block's update, of 12 bytes a parameter and the weight: less than its backward, beside which it runs.
    update_ms = LAYER_MS / 2 * (12 + 2)
    assert update_ms < 3 * forward_ms
    assert step_ms <= 1.03 * 4 * forward_ms * layers + update_ms


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("slices", [1, 2])
def test_nobody_is_early_where_backward_updates(clocks, prefetch, slices):
    steady_step_ms(
        clocks,
        forward_ms=7.0,
        prefetch=prefetch,
        slices=slices,
        max_grad_norm=None,
        backward_overlap="update",
    )


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("slices", [1, 2])
def test_nobody_is_early_at_any_window(clocks, prefetch, slices):
    steady_step_ms(clocks, forward_ms=7.0, prefetch=prefetch, slices=slices)


@pytest.mark.slow
def test_a_copy_home_that_nobody_waits_for_is_found(clocks, monkeypatch):
    """The detector detects: without the wait at eviction the block's memory would go too early."""
    monkeypatch.setattr(
        streamed_block.StreamedBlock, "stored", lambda block, event: setattr(block, "is_being_written", False)
    )
    with pytest.raises(AssertionError, match="in use until"):
        steady_step_ms(clocks, forward_ms=2.0)
