# SPDX-License-Identifier: Apache-2.0
"""Sleeps on every stream, at every seam: results must stay those of a run that waits everywhere.

Layers of very low arithmetic intensity leave the copies no time to hide, and the run that is compared with is made
separately and synchronously, so that it hides no missing wait.
"""

import copy
import itertools
import random
from contextlib import contextmanager

import pytest
import torch
from optimizer_training import OPTIONS
from torch import nn

from reference_impl import CpuUpdate, HybridDeviceOptimizer, Streaming
from reference_impl.device import CudaDevice

pytestmark = pytest.mark.cuda

# Cycles of some GHz: none, a tenth of a millisecond, a millisecond.
SLEEPS = [0, 200_000, 2_000_000]
STEPS = 120


@pytest.fixture
def sleepy(monkeypatch):
    """Return a function that makes the named places sleep at random."""
    chance = random.Random(0)

    def nap():
        cycles = chance.choice(SLEEPS)
        if cycles:
            torch.cuda._sleep(cycles)

    def napping(original):
        @contextmanager
        def enter(self, *size_bytes):
            with original(self, *size_bytes):
                nap()
                yield

        return enter

    def disturb(places, model):
        for place, name in (("d2h", "on_d2h"), ("h2d", "on_h2d"), ("h2d", "on_h2d_of_weights")):
            if place in places:
                monkeypatch.setattr(CudaDevice, name, napping(getattr(CudaDevice, name)))
        for layer in model.modules():
            if "forward" in places:
                layer.register_forward_pre_hook(lambda *_: nap())
            if "backward" in places:
                layer.register_full_backward_pre_hook(lambda *_: nap())
        return nap if "step" in places else lambda: None

    return disturb


def wide():
    """8.4 million parameters that are used for 16 rows only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 131072), nn.ReLU(), nn.Linear(131072, 32)).to("cuda", torch.bfloat16)


def deep():
    torch.manual_seed(0)
    layers = itertools.chain.from_iterable((nn.Linear(512, 512), nn.Tanh()) for _ in range(6))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def inputs_of(model, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    width = model[0].in_features
    return [torch.randn(16, width, generator=generator).to("cuda", torch.bfloat16) for _ in range(count)]


def build(model, **options):
    return HybridDeviceOptimizer(
        model.parameters(), **{"cpu": CpuUpdate(bucket_elements=2**18), **OPTIONS, "lr": 1e-3, **options}
    )


def train(model, optimizer, data, *, before_step=lambda: None, set_to_none=True, wait=lambda: None):
    """Return the losses; every 17th step is not finite."""
    losses = []
    for index, batch in enumerate(data):
        wait()
        loss = model(batch).float().square().mean()
        (loss * float("nan") if index % 17 == 5 else loss).backward()
        before_step()
        wait()
        optimizer.step()
        wait()
        optimizer.zero_grad(set_to_none)
        losses.append(loss.detach())
    optimizer.synchronize()
    torch.cuda.synchronize()
    return torch.stack(losses)


def waiting_run(make, data, **options):
    """Train with the host waiting for the device around every call; returns weights and losses."""
    model = make()
    with build(model, cpu=CpuUpdate(bucket_elements=2**18, overlap_forward=False), **options) as optimizer:
        losses = train(model, optimizer, data, wait=torch.cuda.synchronize)
    return [param.detach().clone() for param in model.parameters()], losses


def assert_same(model, losses, expected):
    weights, expected_losses = expected
    assert torch.equal(losses, expected_losses)
    for param, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(param.detach(), weight)


@pytest.mark.parametrize(("make", "fraction"), [(wide, 0.5), (wide, 1.0), (deep, 0.7)])
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients"])
@pytest.mark.parametrize(
    "places", [{"d2h"}, {"h2d"}, {"forward", "backward"}, {"step"}, {"d2h", "h2d", "forward", "backward", "step"}],
    ids=lambda places: "+".join(sorted(places)),
)  # fmt: skip
def test_sleeping_anywhere_changes_no_bit(sleepy, make, backward_overlap, fraction, places):
    options = {"offload_fraction": fraction, "backward_overlap": backward_overlap, "max_grad_norm": 0.05}
    model = make()
    data = inputs_of(model, STEPS if len(places) == 5 else 30)
    expected = waiting_run(make, data, **options)
    with build(model, **options) as optimizer:
        optimizer.attach(model)
        nap = sleepy(places, model)
        assert_same(model, train(model, optimizer, data, before_step=nap), expected)


@pytest.mark.parametrize(("make", "split"), [(wide, (0.2, 0.5, 0.3)), (deep, (0.0, 0.7, 0.3))])
@pytest.mark.parametrize("extra", [{}, {"prefetch_bytes": 2**28}, {"states": "compact-8"}], ids=str)
def test_three_shares_side_by_side_change_no_bit(sleepy, make, split, extra):
    streaming = Streaming(chunk_bytes=2**20, **extra)
    options = {"split": split, "streaming": streaming, "max_grad_norm": 0.05}
    model = make()
    data = inputs_of(model, 40)
    expected = waiting_run(make, data, **options)
    with build(model, **options) as optimizer:
        optimizer.attach(model)
        nap = sleepy({"d2h", "h2d", "forward", "backward", "step"}, model)
        assert_same(model, train(model, optimizer, data, before_step=nap), expected)


@pytest.mark.parametrize("make", [wide, deep])
def test_updates_that_start_in_backward_change_no_bit(sleepy, make):
    options = {"offload_fraction": 1.0, "backward_overlap": "update"}
    model = make()
    data = inputs_of(model, STEPS)
    expected = finite_run(make(), data, waits=True, **options)
    sleepy({"d2h", "h2d", "forward", "backward"}, model)
    _, losses = finite_run(model, data, waits=False, **options)
    assert_same(model, losses, expected)


def finite_run(model, data, *, waits, **options):
    losses = []
    with build(model, **options) as optimizer:
        if not waits:
            optimizer.attach(model)
        for batch in data:
            loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if waits:
                torch.cuda.synchronize()
        optimizer.synchronize()
        torch.cuda.synchronize()
    return [param.detach().clone() for param in model.parameters()], torch.stack(losses)


def test_all_work_may_be_on_another_stream(sleepy):
    model = deep()
    data = inputs_of(model, STEPS)
    expected = waiting_run(deep, data)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), build(model) as optimizer:
        optimizer.attach(model)
        nap = sleepy({"d2h", "h2d", "step", "forward"}, model)
        assert_same(model, train(model, optimizer, data, before_step=nap), expected)


def test_the_stream_may_change_between_any_two_calls(sleepy):
    """The caller orders its own streams, as with any optimizer; ours are our own business."""
    model = deep()
    data = inputs_of(model, STEPS)
    expected = finite_run(deep(), data, waits=True)
    streams = itertools.cycle([torch.cuda.Stream() for _ in range(3)])
    current = torch.cuda.current_stream()
    losses = []
    with build(model) as optimizer:
        optimizer.attach(model)
        nap = sleepy({"d2h", "h2d", "forward"}, model)

        @contextmanager
        def next_stream():
            nonlocal current
            following = next(streams)
            following.wait_stream(current)
            current = following
            with torch.cuda.stream(following):
                nap()
                yield

        for batch in data:
            with next_stream():
                loss = model(batch).float().square().mean()
            with next_stream():
                loss.backward()
            with next_stream():
                optimizer.step()
            with next_stream():
                optimizer.zero_grad()
                losses.append(loss.detach())
        torch.cuda.current_stream().wait_stream(current)
        optimizer.synchronize()
        torch.cuda.synchronize()
    assert_same(model, torch.stack(losses), expected)


def test_zeroing_gradients_in_place_waits_until_they_are_read(sleepy):
    model = wide()
    data = inputs_of(model, 40)
    options = {"offload_fraction": 0.5}
    expected = waiting_run(wide, data, **options)
    with build(model, **options) as optimizer:
        optimizer.attach(model)
        sleepy({"d2h"}, model)
        assert_same(model, train(model, optimizer, data, set_to_none=False), expected)


def test_accumulated_gradients_leave_once_and_whole(sleepy):
    model, data = deep(), inputs_of(deep(), 60)
    runs = []
    for net, waits in ((deep(), True), (model, False)):
        with build(net, max_grad_norm=0.05) as optimizer:
            if not waits:
                optimizer.attach(net)
                sleepy({"d2h", "h2d", "forward", "backward"}, net)
            for first, second, third in zip(*[iter(data)] * 3, strict=True):
                with optimizer.accumulate():
                    for batch in (first, second):
                        net(batch).float().square().mean().backward()
                net(third).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if waits:
                    torch.cuda.synchronize()
            optimizer.synchronize()
            torch.cuda.synchronize()
        runs.append([param.detach().clone() for param in net.parameters()])
    for left, right in zip(*runs, strict=True):
        assert torch.equal(left, right)


def test_evaluation_and_averages_between_steps_see_new_weights(sleepy):
    model = deep()
    data = inputs_of(model, 60)
    seen = []
    for net, waits in ((deep(), True), (model, False)):
        with build(net) as optimizer:
            optimizer.attach(net)
            if not waits:
                sleepy({"d2h", "h2d"}, net)
            average = [param.detach().float() for param in net.parameters()]
            outputs = []
            for batch in data:
                net(batch).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if waits:
                    optimizer.synchronize()
                    torch.cuda.synchronize()
                with torch.no_grad():
                    outputs.append(net(data[0]))
                optimizer.synchronize()
                torch._foreach_lerp_(average, [param.detach().float() for param in net.parameters()], 0.1)
            seen.append((torch.stack(outputs), average))
    assert torch.equal(seen[0][0], seen[1][0])
    for left, right in zip(seen[0][1], seen[1][1], strict=True):
        assert torch.equal(left, right)


def test_a_checkpoint_taken_in_flight_is_consistent(sleepy):
    model = deep()
    data = inputs_of(model, 12)
    with build(model, offload_fraction=0.7) as optimizer:
        optimizer.attach(model)
        sleepy({"d2h", "h2d"}, model)
        train(model, optimizer, data[:6])
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, data[6:])
        later = [param.detach().clone() for param in model.parameters()]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, data[6:])
        for param, weight in zip(model.parameters(), later, strict=True):
            assert torch.equal(param.detach(), weight)


@pytest.mark.parametrize("pinned", [True, False])
def test_what_copies_touch_is_pinned(monkeypatch, pinned):
    touched, copy_out = [], CudaDevice.copy_out

    def watched(device, host, *args, **options):
        touched.append(host.is_pinned())
        return copy_out(device, host, *args, **options)

    monkeypatch.setattr(CudaDevice, "copy_out", watched)
    with build(deep(), cpu=CpuUpdate(pinned=pinned)):
        assert touched
        assert all(each == pinned for each in touched)


def test_graph_capture_is_refused():
    model = deep()
    with build(model) as optimizer:
        train(model, optimizer, inputs_of(model, 1))
        with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
