# SPDX-License-Identifier: Apache-2.0
"""Weights never cross to the host: not they, not their views, not autocast's copies of them."""

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader


class Wrapper(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def moved_bytes(model, x, loss=torch.sum):
    with ActivationOffloader(model, min_bytes=1) as offloader:
        loss(model(x)).backward()
        return offloader.offloaded_bytes


@pytest.fixture
def x(device):
    return torch.randn(16, 64, device=device.torch_device, requires_grad=True)


def frozen_linear(device):
    return nn.Linear(64, 64, device=device.torch_device).requires_grad_(False)


def test_a_frozen_linear_moves_nothing(device, x):
    assert moved_bytes(Wrapper(frozen_linear(device)), x) == 0


def test_a_trained_linear_moves_its_input_alone(device, x):
    assert moved_bytes(Wrapper(nn.Linear(64, 64, device=device.torch_device)), x) == x.nbytes


def test_a_weight_with_swapped_data_stays(device, x):
    model = Wrapper(frozen_linear(device))
    with ActivationOffloader(model, min_bytes=1) as offloader:
        model.blocks[0].weight.data = torch.randn(64, 64, device=device.torch_device)
        model(x).sum().backward()
        assert offloader.offloaded_bytes == 0


def test_a_weight_tied_to_a_module_outside_the_layers_stays(device, x):
    class Tied(nn.Module):
        def __init__(self, outside):
            super().__init__()
            self._outside = [outside]

        def forward(self, x):
            return x @ self._outside[0].weight

    model = Wrapper()
    model.head = frozen_linear(device)
    model.blocks.append(Tied(model.head))
    assert moved_bytes(model, x) == 0


def test_a_buffer_stays(device, x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.randn(16, 64))
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x * self.scale

    assert moved_bytes(Wrapper(Scaled().to(device.torch_device)), x) == 0


def test_what_autocast_casts_from_weights_stays(device, x):
    model = Wrapper(nn.Linear(64, 64, bias=False, device=device.torch_device))
    with torch.autocast(device.torch_device.type, dtype=torch.bfloat16):
        moved = moved_bytes(model, x, loss=lambda out: out.float().sum())
    assert moved == x.nbytes // 2
