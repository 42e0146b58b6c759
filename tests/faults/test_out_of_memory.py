# SPDX-License-Identifier: Apache-2.0
"""A filled GPU: batches that do not fit are left out, and training equals the run without them, bit for bit."""

import random

import pytest
import torch
from torch import nn

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader

MIB = 2**20
WIDTH, LAYERS, BATCH, BATCHES = 1024, 6, 2048, 50
OPTIONS = {"lr": 1e-3}


def hybrid(model, **options):
    return HybridDeviceOptimizer(model.parameters(), max_grad_norm=1.0, **OPTIONS, **options)


MODES = {
    "resident": lambda model: hybrid(model, offload_fraction=0.0),
    "half on the CPU": lambda model: hybrid(model, offload_fraction=0.5),
    "all on the CPU": lambda model: hybrid(model, offload_fraction=1.0),
    "three shares": lambda model: hybrid(model, split=(0.3, 0.4, 0.3)),
    "state offloader": lambda model: OptimizerStateOffloader(
        torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS), max_grad_norm=1.0, chunk_bytes=8 * MIB
    ),
}


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device="cuda", dtype=torch.bfloat16)


def batch_of(index):
    generator = torch.Generator("cuda").manual_seed(1000 + index)
    return torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def fill(free_bytes):
    """Take the device's memory but for `free_bytes`."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    there, _ = torch.cuda.mem_get_info()
    return torch.empty(max(there - free_bytes, 1), dtype=torch.uint8, device="cuda")


def train(build, *, attached, fails):
    """Train on all batches that fit; return which were taken, their losses and the weights.

    `fails` says for a batch before which phase (0 forward, 1 backward, 2 step) how many bytes are left, or None.
    """
    model = network()
    # A library takes memory for its handles at its first call, and says that it is short of it in words of its own.
    model(batch_of(0)).float().sum().backward()
    model.zero_grad()
    taken, losses, phases = [], [], []
    with build(model) as optimizer:
        if attached:
            optimizer.attach(model)
        for index in range(BATCHES):
            plan = fails(index)
            ballast, phase = None, 0
            try:
                batch = batch_of(index)
                for phase in range(3):
                    if plan is not None and plan[0] == phase:
                        ballast = fill(plan[1])
                    if phase == 0:
                        loss = model(batch).float().square().mean()
                    elif phase == 1:
                        loss.backward()
                    else:
                        optimizer.step()
                taken.append(index)
                losses.append(loss.detach())
            except torch.OutOfMemoryError:
                phases.append(phase)
                if phase == 2 and optimizer.status == "begun":
                    taken.append(index)
                    losses.append(loss.detach())
            finally:
                del ballast
                # A tensor in the cached ballast would keep all of it from allocations of other sizes.
                torch.cuda.empty_cache()
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = [param.detach().clone() for param in model.parameters()]
    return taken, torch.stack(losses), weights, phases


@pytest.mark.cuda
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_batches_that_do_not_fit_are_left_out(mode, attached):
    chance = random.Random(f"{mode}{attached}")
    plans = {
        index: (chance.randrange(3), chance.choice((1, 2, 4, 8, 16)) * MIB)
        for index in range(BATCHES)
        if chance.random() < 0.6
    }
    taken, losses, weights, phases = train(MODES[mode], attached=attached, fails=plans.get)
    assert phases, "no batch ran out of memory"

    left_out = set(range(BATCHES)) - set(taken)
    model = network()
    with MODES[mode](model) as optimizer:
        expected = []
        for index in range(BATCHES):
            if index in left_out:
                continue
            loss = model(batch_of(index)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.detach())
        optimizer.synchronize()
        assert torch.equal(losses, torch.stack(expected))
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
