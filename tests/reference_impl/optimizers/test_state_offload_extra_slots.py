# SPDX-License-Identifier: Apache-2.0
"""Slots beyond three take memory that backward frees, and are freed before the next forward's peak."""

import gc

import pytest
import torch
from optimizer_reference import MasterAdamW, Toy, batches

from reference_impl import OptimizerStateOffloader
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
CHUNK_ELEMENTS = 2**13
WIDTH, LAYERS, TOKENS = 128, 6, 2048
MANY = 1000 * 10 * CHUNK_ELEMENTS


def build(model, **options):
    inner = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    optimizer = OptimizerStateOffloader(inner, **options)
    optimizer.attach(model)
    return optimizer


class Wide(torch.nn.Sequential):
    """More activations than states: six layers on 2048 tokens, of two chunks each."""

    def __init__(self):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
        super().__init__(*(part for layer in layers for part in (layer, torch.nn.GELU())))

    def loss(self):
        torch.manual_seed(1)
        batch = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
        return self(batch.to(self[0].weight.device)).float().square().mean()


def observe(budget):
    """Train five steps on the twin; return bytes at the end of forward, peak of backward, and prefetched chunks."""
    model = Wide()
    seen = []
    with Ledger(Device.of("cpu"), track=model.parameters()) as ledger:
        options = {"chunk_bytes": 10 * CHUNK_ELEMENTS, "device_budget_bytes": budget}
        with build(model, **options) as optimizer:
            for _ in range(5):
                loss = model.loss()
                gc.collect()
                end_of_forward = ledger.device_bytes
                ledger.reset_peak()
                loss.backward()
                del loss
                gc.collect()
                streamed = optimizer.streamed
                seen.append(
                    (end_of_forward, ledger.peak_device_bytes, len(streamed.loaded), streamed.extra_bytes)
                )
                ledger.reset_peak()
                optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


@pytest.mark.slow
def test_states_come_in_to_memory_that_backward_frees_and_peaks_stay():
    plain, weights = observe(None)
    prefetching, same = observe(MANY)
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    for (forward, peak, loaded, extra), (base_forward, base_peak, base_loaded, nothing) in zip(
        prefetching[2:], plain[2:], strict=True
    ):
        assert forward == base_forward
        assert peak == base_peak
        assert nothing == 0
        assert base_loaded == 3
        assert loaded == 3 + extra // (10 * CHUNK_ELEMENTS)
        # Half of backward's freed bytes hold half of all chunks or more.
        assert loaded >= LAYERS
    assert prefetching[0][3] == 0


@pytest.mark.slow
def test_the_budget_holds():
    slots = 5
    seen, _ = observe((slots * 10 + 10) * CHUNK_ELEMENTS)
    assert {extra for *_, extra in seen[1:]} == {(slots - 3) * 10 * CHUNK_ELEMENTS}


def test_only_the_last_backward_of_a_step_adds_slots(device):
    model = Wide().to(device.torch_device)
    with build(model, chunk_bytes=10 * CHUNK_ELEMENTS, device_budget_bytes=MANY) as optimizer:
        extra = []
        for index in range(6):
            loss = model.loss()
            device.synchronize()
            optimizer.synchronize()
            loss.backward()
            extra.append(optimizer.streamed.extra_bytes > 0)
            if index % 2:
                optimizer.step()
        assert extra == [False, False, False, True, False, True]


@pytest.mark.slow
def test_loading_while_there_are_extra_slots_changes_no_bit(device):
    model, plain = Wide().to(device.torch_device), Wide().to(device.torch_device)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    with build(model, chunk_bytes=10 * CHUNK_ELEMENTS, device_budget_bytes=MANY) as optimizer:
        for index in range(6):
            model.loss().backward()
            plain.loss().backward()
            if index == 3:
                assert optimizer.streamed.extra_bytes
                optimizer.load_state_dict(optimizer.state_dict())
                assert not optimizer.streamed.extra_bytes
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        for (name, left), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(left, right), name


@pytest.mark.parametrize("chunk_bytes", [768, 12 * 448])
def test_a_step_keeps_the_hyper_parameters_that_it_began_with(device, chunk_bytes):
    """Chunks are queued as the next forward asks for them, when a scheduler has already gone on."""
    torch.manual_seed(3)
    model = Toy().to(device.torch_device)
    torch.manual_seed(3)
    plain = Toy().to(device.torch_device)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    with build(model, chunk_bytes=chunk_bytes) as optimizer:
        for index, batch in enumerate(batches(device.torch_device, 4)):
            for net, each, groups in (
                (model, optimizer, optimizer.param_groups),
                (plain, reference, reference.inner.param_groups),
            ):
                net(batch).backward()
                each.step()
                each.zero_grad()
                groups[0]["lr"] = 1e-2 / (index + 2)
        waiting = optimizer.streamed.unqueued
        assert (waiting > 0) == (chunk_bytes == 768)
        for (name, left), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(left, right), name
        assert not optimizer.streamed.unqueued
