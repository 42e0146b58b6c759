# SPDX-License-Identifier: Apache-2.0
"""Tensors that were taken from a parameter before a step show its new weight behind it, and nobody else waits."""

import pytest
import torch
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn

from reference_impl.optimizers.engine import Engine

STEPS = 4


def attached(make):
    def build(model):
        optimizer = make(model)
        optimizer.attach(model)
        return optimizer

    return build


OPTIMIZERS = {
    "on the CPU": attached(hybrid),
    "on the CPU, in backward": attached(lambda model: hybrid(model, backward_overlap="update")),
    "half on the CPU": attached(lambda model: hybrid(model, offload_fraction=0.5)),
    "three ways": attached(lambda model: hybrid(model, split=(0.3, 0.4, 0.3))),
    "streamed": attached(streaming),
}


def data_of(model):
    return [param.data for param in model.parameters()]


def detached(model):
    return [param.detach() for param in model.parameters()]


def state_dict(model):
    return list(model.state_dict().values())


def views(model):
    return [param.detach().view(-1)[1:] for param in model.parameters()]


def exchanged(model):
    """The weights are tensors of somebody's own."""
    held = [param.data.clone() for param in model.parameters()]
    for param, tensor in zip(model.parameters(), held, strict=True):
        param.data = tensor
    return held


def of_one_buffer(model):
    """Weights are slices of a buffer that is kept."""
    buffer = torch.cat([param.data.flatten() for param in model.parameters()])
    start = 0
    for param in model.parameters():
        param.data = buffer[start : start + param.numel()].view_as(param)
        start += param.numel()
    return [buffer]


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device.torch_device)


def seen_behind_steps(device, make, hold):
    """Return the values that a holder of tensors finds in them behind each step."""
    model = net(device)
    optimizer, found = make(model), []
    held = hold(model)
    for step in range(STEPS):
        model(torch.full((2, 64), float(step), device=device.torch_device)).square().mean().backward()
        optimizer.step()
        found += [each.clone() for each in held]
        optimizer.zero_grad()
    if hasattr(optimizer, "close"):
        optimizer.close()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("hold", [data_of, detached, state_dict, views, exchanged, of_one_buffer])
def test_what_was_held_before_a_step_is_new_behind_it(device, kind, hold):
    if device.is_accelerator and kind != "streamed":
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    plain = seen_behind_steps(
        device, lambda model: torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS), hold
    )
    found = seen_behind_steps(device, OPTIMIZERS[kind], hold)
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits_for_no_weight_that_nobody_holds(device, kind, monkeypatch):
    waited = []
    real = Engine.wait_in_step
    monkeypatch.setattr(
        Engine,
        "wait_in_step",
        lambda optimizer, members: real(optimizer, [m for m in members if waited.append(m) is None]),
    )

    def hold(model):
        # Whoever has held one once, and does not any more.
        data_of(model)
        state_dict(model)
        return []

    seen_behind_steps(device, OPTIMIZERS[kind], hold)
    assert waited == []
    seen_behind_steps(device, OPTIMIZERS[kind], lambda model: [model[0].weight.data])
    assert len(waited) == STEPS
