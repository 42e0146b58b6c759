# SPDX-License-Identifier: Apache-2.0
"""A net that FSDP2 shards on one rank, and its training by torch."""

import torch
from optimizer_training import OPTIONS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    """Root parameters, and two layers that are sharded on their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(13, 70)
        self.layers = nn.ModuleList(nn.Linear(70, 70) for _ in range(2))
        self.last = nn.Linear(70, 5)
        self.leaves_out = ()

    def forward(self, batch):
        hidden = self.first(batch)
        for index, layer in enumerate(self.layers):
            if index not in self.leaves_out:
                hidden = torch.tanh(layer(hidden))
        return self.last(hidden).square().sum()

    def score(self, batch):
        """Another door than `forward`, for `register_fsdp_forward_method`."""
        return Net.forward(self, batch)


def net(device="cpu", **options):
    model = Net().to(device)
    mesh = init_device_mesh(device, (1,))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def data_of(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 13, generator=generator) for _ in range(count)]


def weights(model):
    return [param.detach().to_local().clone() for param in model.parameters()]


def trained_plainly(data):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    for batch in data:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def assert_same(one, other):
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
