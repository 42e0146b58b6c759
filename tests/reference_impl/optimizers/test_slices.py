# SPDX-License-Identifier: Apache-2.0
"""Weights that are slices of one buffer have one counter of writes: a write to one is no write to the others."""

from functools import partial

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import SMALL_CHUNKS, fresh, hybrid, streaming, train
from torch import nn

BUILDS = {
    "part": partial(hybrid, offload_fraction=0.6),
    "three shares": partial(hybrid, split=(0.2, 0.4, 0.4), streaming=SMALL_CHUNKS),
    "streamed": streaming,
}


def made(device, dtype, *, sliced):
    model = fresh(device, dtype)
    model.unused.requires_grad_(requires_grad=False)
    if sliced:
        params = list(model.parameters())
        buffer = torch.cat([param.detach().flatten() for param in params])
        parts = buffer.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            sliced_param = nn.Parameter(part.view_as(param), param.requires_grad)
            for module in model.modules():
                held = module._parameters
                held.update({name: sliced_param for name, each in held.items() if each is param})
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_a_write_to_one_is_none_to_the_others(device, dtype, build):
    def trained(*, sliced):
        model, data = made(device, dtype, sliced=sliced), batches(device.torch_device, 6)
        params = [param for param in model.parameters() if param.requires_grad]
        with BUILDS[build](model) as optimizer:
            optimizer.attach(model)
            for index, batch in enumerate(data):
                params[index % 3].requires_grad_(requires_grad=False)
                train(model, optimizer, [batch])
                params[index % 3].requires_grad_(requires_grad=True)
                with torch.no_grad():
                    params[-1 - index % 3].mul_(0.9)
            states = torch.utils._pytree.tree_leaves(optimizer.state_dict()["state"])
            return [*model.state_dict().values(), *states]

    torch.testing.assert_close(trained(sliced=True), trained(sliced=False), rtol=0, atol=0)
