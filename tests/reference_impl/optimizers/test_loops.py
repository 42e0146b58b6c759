# SPDX-License-Identifier: Apache-2.0
"""Training loops beyond a step a batch: accumulate, clip by hand, stop and resume, choose a fraction."""

import copy
import itertools

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import assert_same_weights, hybrid, reference, train, twins
from torch import nn

from reference_impl import CpuUpdate
from reference_impl.memory.ledger import Ledger


def accumulated_step(model, optimizer, data):
    """One step over all of `data`, with the optimizer's own way to accumulate where it has one."""
    *first, last = data
    if hasattr(optimizer, "accumulate"):
        with optimizer.accumulate():
            for batch in first:
                model(batch).backward()
    else:
        for batch in first:
            model(batch).backward()
    model(last).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
@pytest.mark.parametrize("attached", [False, True])
def test_the_number_of_micro_batches_may_change_between_steps(device, backward_overlap, attached):
    model, plain = twins(device)
    data = iter(batches(device.torch_device, 10))
    other = reference(plain)
    with hybrid(model, backward_overlap=backward_overlap) as optimizer:
        if attached:
            optimizer.attach(model)
        for count in (1, 4, 2, 1, 2):
            step = [next(data) for _ in range(count)]
            accumulated_step(model, optimizer, step)
            accumulated_step(plain, other, step)
        assert_same_weights(model, plain)


def test_a_resumed_run_starts_with_the_next_accumulation(device):
    """Saved between two accumulated steps, at another bucket size and resumed without a difference."""
    model, resumed = twins(device)
    data = batches(device.torch_device, 6)
    with hybrid(model) as one, hybrid(resumed, cpu=CpuUpdate(bucket_elements=448), lr=9.0) as other:
        one.attach(model)
        accumulated_step(model, one, data[:3])
        saved = copy.deepcopy((model.state_dict(), one.state_dict()))
        accumulated_step(model, one, data[3:])
        resumed.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        accumulated_step(resumed, other, data[3:])
        assert_same_weights(model, resumed)


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-2),
    ],
    ids=["value", "norm"],
)
def test_gradients_that_wait_for_step_may_be_clipped_by_hand(device, clip):
    model, plain = twins(device)
    other = reference(plain)
    with hybrid(model, backward_overlap="nothing") as optimizer:
        optimizer.attach(model)
        for batch in batches(device.torch_device, 3):
            for net, opt in ((model, optimizer), (plain, other)):
                net(batch).backward()
                clip(net)
                opt.step()
                opt.zero_grad()
        assert_same_weights(model, plain)


def test_a_norm_of_zero_is_a_step_like_any_other(device):
    """Moments decay and weights with them, as in torch."""
    model, plain = twins(device)
    data = batches(device.torch_device, 3)
    other = reference(plain, max_grad_norm=0.1)
    with hybrid(model, max_grad_norm=0.1) as optimizer:
        for net, opt in ((model, optimizer), (plain, other)):
            train(net, opt, data[:1])
            (net(data[1]) * 0).backward()
            opt.step()
            opt.zero_grad()
            train(net, opt, data[2:])
        assert_same_weights(model, plain)
        assert optimizer.state[model.first.weight]["step"] == 3


def test_peaks_fall_with_the_fraction_and_losses_stay(device):
    losses, peaks = [], {}
    # On CUDA, layers that outweigh the passing workspaces of cuBLAS.
    width = 1024 if device.is_accelerator else 256
    numel = 6 * (width * width + width)
    for fraction in (0.0, 1e-4, 0.25, 0.5, 0.75, 1.0):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(device.torch_device)
        batch = torch.randn(4, width).to(device.torch_device)
        seen = []
        with (
            Ledger(device, track=model.parameters()) as ledger,
            hybrid(model, offload_fraction=fraction, cpu=CpuUpdate(bucket_elements=width * 64)) as optimizer,
        ):
            for index in range(4):
                if index == 2:
                    optimizer.synchronize()
                    device.synchronize()
                    ledger.reset_peak()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
                del loss
            device.synchronize()
            peaks[fraction] = ledger.peak_device_bytes
        losses.append(seen)
    # One element's rounding apart at most: CPU and GPU kernels differ in the last bit, which grew to 1.3e-6 on CUDA.
    for seen in losses:
        assert seen == pytest.approx(losses[0], rel=1e-5 if device.is_accelerator else 1e-6)
    # Where nothing is offloaded all gradients are there at once, so those in flight come on top of nothing.
    allowed_bytes = 2 * 4 * 64 * width + (2**21 if device.is_accelerator else 0)
    for fraction, peak_bytes in peaks.items():
        assert peak_bytes <= peaks[0.0] - 8 * numel * fraction + allowed_bytes, peaks
    if not device.is_accelerator:
        # There nothing is in flight, so each peak is below the one before it as well.
        falling = itertools.pairwise(peaks.values())
        assert all(after <= before + allowed_bytes for before, after in falling), peaks
