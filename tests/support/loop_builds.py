# SPDX-License-Identifier: Apache-2.0
"""A small model of blocks, and the optimizers that loops of other people are given: plain AdamW and each class here."""

import torch
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn

from reference_impl import TrainableLayerStreamer

STEPS = 4


class Net(nn.Module):
    """Blocks of which a forward may leave some out."""

    def __init__(self, out=1, blocks=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.head = nn.Linear(16, out)

    def forward(self, x, visits=None):
        for index in range(len(self.layers)) if visits is None else visits:
            x = torch.tanh(self.layers[index](x)) + x
        return self.head(x)


def plain(model, part=None):
    return torch.optim.AdamW((part or model).parameters(), fused=True, **OPTIONS)


def detached(model, part=None):
    return hybrid(part or model)


def attached(model, part=None, **options):
    """An optimizer of `part` of a model, or of all of it."""
    optimizer = hybrid(part or model, **options)
    optimizer.attach(model)
    return optimizer


def half(model, part=None):
    return attached(model, part, offload_fraction=0.5)


def kept(model, part=None):
    return attached(model, part, backward_overlap="nothing")


def in_backward(model, part=None):
    return attached(model, part, backward_overlap="update")


def in_three_shares(model, part=None):
    return attached(model, part, split=(0.3, 0.4, 0.3))


def streamed(model, part=None):
    optimizer = streaming(part or model)
    optimizer.attach(model)
    return optimizer


def layers(model, part=None):
    """The optimizer of a streamer, which closes with it; one block at a time is there."""
    streamer = TrainableLayerStreamer(model, plain(model, part), prefetch=0)
    optimizer, close = streamer.optimizer, streamer.optimizer.close
    optimizer.close = lambda: (streamer.close(), close())
    optimizer.gathered, optimizer.weights_report = streamer.gathered, lambda: streamer.report.weights
    return optimizer


BUILDS = [detached, attached, half, kept, in_backward, in_three_shares, streamed, layers]


def finish(*optimizers):
    for optimizer in optimizers:
        for end in ("synchronize", "close"):
            getattr(optimizer, end, lambda: None)()


def inputs(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator).to(device.torch_device) for _ in range(STEPS)]


def made(device, seed=0, **shape):
    torch.manual_seed(seed)
    return Net(**shape).to(device.torch_device)


def synchronize(optimizer):
    getattr(optimizer, "synchronize", lambda: None)()


def named(each):
    """Return the id of a loop or a build."""
    return getattr(each, "__name__", None)
