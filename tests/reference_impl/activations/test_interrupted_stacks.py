# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C inside torch's own context managers: nothing of an offloader's stays on the stacks of the thread."""

import itertools
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import counted
from leftovers import Leftovers
from torch import nn

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger

TORCHS = (
    "torch/autograd/graph.py",
    "torch/autograd/grad_mode.py",
    "torch/utils/_python_dispatch.py",
    "torch/amp/autocast_mode.py",
)
OFFLOADERS: dict[str, Callable[[nn.Module], Any]] = {
    "layers": lambda model: ActivationOffloader(model, num_layers=1, min_bytes=1),
    "modules": lambda model: ActivationOffloader(model, modules=["0"], min_bytes=1),
    "budget": lambda model: ActivationOffloader(model, budget_bytes=40_000, min_bytes=1),
    "checkpoint": lambda model: CheckpointOffloader(model, min_bytes=1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def of_torch(path: str) -> bool:
    return path.endswith(TORCHS)


@pytest.mark.parametrize("kind", OFFLOADERS)
def test_an_interrupt_in_a_context_of_torchs_leaves_nothing_there(kind):
    model, batch = Net(), torch.ones(2, 32)
    with Ledger(Device.of("cpu")), OFFLOADERS[kind](model):
        for _ in range(2):
            model(batch).backward()
        before = Leftovers.now().modes
        for nth in itertools.count(1):
            with (
                suppress(KeyboardInterrupt),
                counted(nth, partial(signal.raise_signal, signal.SIGINT), of=of_torch) as count,
            ):
                model(batch).backward()
            assert Leftovers.now().modes == before, f"bytecode {nth}"
            if count[0] < nth:
                break
    assert nth > 20
