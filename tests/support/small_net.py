# SPDX-License-Identifier: Apache-2.0
"""A small network with a buffer, and the loss of a step, a function of the step's number alone."""

import torch
from torch import nn


def net(device):
    """Three blocks and a norm on `device`, always the same."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(64)).to(device.torch_device)


def loss_of(model, step):
    """A function of the batch of a step, on the device of the model."""
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return model(batch.to(next(model.parameters()).device)).square().mean()
