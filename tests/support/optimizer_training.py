"""Twin models, one trained by the hybrid optimizer and one by what it must equal."""

import copy

import torch
from optimizer_reference import MasterAdamW, Toy

from reference_impl import HybridDeviceOptimizer

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


def twins(device, dtype=torch.bfloat16):
    torch.manual_seed(3)
    model = Toy(dtype).to(device.torch_device)
    return model, copy.deepcopy(model)


def hybrid(params, **options):
    """All on the CPU in small buckets, unless stated."""
    listed = params.parameters() if isinstance(params, torch.nn.Module) else params
    return HybridDeviceOptimizer(listed, **{"bucket_elements": 1024, **OPTIONS, **options})


def reference(model, *, on_cpu=True, **options):
    return MasterAdamW(model, on_cpu=on_cpu, **{**OPTIONS, **options})


def train(model, optimizer, data):
    """Return the losses."""
    losses = []
    for batch in data:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_weights(one, other):
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
