# SPDX-License-Identifier: Apache-2.0
"""Whether a step happens, and by how much its gradients are scaled."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, hybrid, reference, train, twins

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients.clip_decision import decide, norms_of
from reference_impl.optimizers.step import StepPlan

finite = st.floats(0, 2.0**60, width=32)


def decision_of(norms, device=None, **options):
    device = device or Device.of("cpu")
    asked = {"reduce_norm_squared": None, "max_norm": None, "loss_scale": None, "found_inf": None, **options}
    found = [torch.tensor(norm, dtype=torch.float32, device=device.torch_device) for norm in norms]
    return decide(found, device, **asked)


def read(decision, device):
    arena = HostArena(device, slab_bytes=2**21)
    decision.send(device, arena)
    answer = CpuStep(StepPlan([], decision)).scale_and_skip()
    assert arena.live_bytes == 0
    arena.close()
    return answer


def test_a_norm_has_the_bits_that_it_has_alone(device):
    """Of any lengths and dtypes, in the order in which gradients are given."""
    dtypes = (torch.bfloat16, torch.float32)
    gradients = [
        torch.randn(length, device=device.torch_device).to(dtypes[index % 2])
        for index, length in enumerate((3, 70_000, 64, 1, 1_000_003, 65_536, 0))
    ]
    found = norms_of(gradients)
    assert all(torch.equal(norm, norms_of([each])[0]) for norm, each in zip(found, gradients, strict=True))
    wanted = [torch.linalg.vector_norm(each.double()).item() for each in gradients]
    assert [norm.item() for norm in found] == pytest.approx(wanted, rel=1e-4)
    assert {norm.dtype for norm in found} == {torch.float32}


def test_nothing_is_judged_without_gradients():
    assert decision_of([]) is None


def test_a_rank_without_gradients_takes_part_in_the_reduction():
    decision = decision_of([], reduce_norm_squared=lambda squared: squared + 9, max_norm=1.0)
    assert decision.norm == 3
    assert decision.found_inf == 0


@given(st.lists(finite, min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_the_scale_is_that_of_clipping(norms, max_norm):
    decision = decision_of(norms, max_norm=max_norm)
    norm = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float32))
    assert torch.equal(decision.norm, norm)
    assert torch.equal(decision.grad_scale, torch.clamp((norm + 1e-6) / max_norm, min=1.0))
    assert decision.found_inf == (0.0 if torch.isfinite(norm) else 1.0)


@pytest.mark.parametrize(
    ("norm", "max_norm", "scale"),
    [(0.0, 1.0, None), (0.5, 1.0, None), (2.0, 2.0001, None), (4.0, 2.0, (4 + 1e-6) / 2), (1.0, None, None)],
)
def test_no_scale_is_exactly_one(device, norm, max_norm, scale):
    """A norm of zero or just below the threshold leaves gradients as they are."""
    grad_scale, skip = read(decision_of([norm], device, max_norm=max_norm), device)
    assert not skip
    assert grad_scale is None if scale is None else grad_scale.item() == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_is_not_finite_is_skipped(device, bad, max_norm):
    _, skip = read(decision_of([1.0, bad, 2.0], device, max_norm=max_norm), device)
    assert skip


def test_a_loss_scale_is_taken_off_before_clipping(device):
    decision = decision_of([8.0], device, max_norm=1.0, loss_scale=torch.tensor(4.0))
    assert decision.norm == 2
    grad_scale, _ = read(decision, device)
    assert grad_scale.item() == pytest.approx(8.0, rel=1e-5)


def test_the_finding_of_others_counts(device):
    _, skip = read(decision_of([1.0], device, found_inf=torch.tensor(1.0)), device)
    assert skip


def test_other_ranks_decide_too(device):
    def with_a_bad_rank(squared):
        return squared + math.inf

    _, skip = read(decision_of([1.0], device, reduce_norm_squared=with_a_bad_rank), device)
    assert skip


@pytest.mark.parametrize("name", ["embed", "first", "second"])
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_one_bad_element_anywhere_changes_no_bit(device, name, backward_overlap, fraction):
    """`embed` is the last to arrive, `second` the first; the step counters stay as well."""
    model, plain = twins(device)
    data = batches(device.torch_device, 4)
    with (
        hybrid(
            model, offload_fraction=fraction, backward_overlap=backward_overlap, max_grad_norm=1.0
        ) as optimizer,
        hybrid(plain, offload_fraction=fraction, max_grad_norm=1.0) as other,
    ):
        optimizer.attach(model)
        train(model, optimizer, data[:2])
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        weight = getattr(model, name).weight
        bad = torch.zeros_like(weight)
        bad.view(-1)[-1] = math.inf
        handle = weight.register_hook(lambda grad: grad + bad)
        train(model, optimizer, data[2:3])
        handle.remove()
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        train(model, optimizer, data[3:])
        train(plain, other, data[:2] + data[3:])
        assert_same_weights(model, plain)


@pytest.mark.parametrize("bound", [0.999, 1.001])
def test_a_threshold_just_above_and_just_below_the_norm(device, bound):
    data = batches(device.torch_device, 1)
    measured, _ = twins(device)
    with hybrid(measured) as optimizer:
        train(measured, optimizer, data)
        max_grad_norm = optimizer.grad_norm.item() * bound
    model, plain = twins(device)
    with hybrid(model, max_grad_norm=max_grad_norm) as optimizer:
        train(model, optimizer, data)
    train(plain, reference(plain, max_grad_norm=max_grad_norm), data)
    assert_same_weights(model, plain)
    if bound > 1:
        assert_same_weights(model, measured)


class TestGradScaler:
    """`torch.amp.GradScaler` with gradients that wait for `step()`."""

    @pytest.fixture
    def make(self, device):
        model, plain = twins(device, torch.float32)
        scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**8, growth_interval=2)
        with hybrid(model, backward_overlap="nothing") as optimizer:
            optimizer.attach(model)
            yield model, plain, optimizer, scaler

    def test_unscaling_and_clipping_outside(self, device, make):
        model, plain, optimizer, scaler = make
        theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        for batch in batches(device.torch_device, 3):
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            plain(batch).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
        optimizer.synchronize()
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left, right)

    def test_one_bad_parameter_skips_all_and_halves_the_scale(self, device, make):
        model, _, optimizer, scaler = make
        data = batches(device.torch_device, 4)
        scales = []
        for index, batch in enumerate(data):
            before = copy.deepcopy(model.state_dict())
            scaler.scale(model(batch)).backward()
            if index == 1:
                model.second.weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            assert same == (index == 1)
        assert scales == [256.0, 128.0, 128.0, 256.0]
        assert optimizer.state[model.first.weight]["step"] == 3
