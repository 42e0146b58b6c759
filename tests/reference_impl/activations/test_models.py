# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: the step is bitwise the same with and without offload."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from reference_impl.activations import ActivationOffloader


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    """Routes each token to one expert: the shapes inside change with the data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x):
        score, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero(as_tuple=True)
            out[mine] = expert(x[mine])
        return x + out * score.unsqueeze(-1)


class GroupedQueryAttention(nn.Module):
    """Rotary positions, four query heads over two key heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 64, bias=False)
        angles = torch.outer(torch.arange(48.0), 10000 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))

    def rotate(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turn[:, None]).flatten(-2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], dim=2)
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


class LoRALinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.a = nn.Linear(32, 4, bias=False)
        self.b = nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return functional.gelu(self.base(x) + self.b(self.a(x)))


class ConvolutionBlock(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


def tokens(device):
    return torch.randn(4, 48, 32, device=device, requires_grad=True)


def images(device):
    image = torch.randn(2, 4, 16, 16, device=device)
    return image.to(memory_format=torch.channels_last).requires_grad_()


MODELS = {
    "mlp": (
        lambda: Stack(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))),
        tokens,
    ),
    "attention": (lambda: Stack(*(GroupedQueryAttention() for _ in range(3))), tokens),
    "experts": (lambda: Stack(Experts(), Experts()), tokens),
    "dropout": (
        lambda: Stack(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3)) for _ in range(3))),
        tokens,
    ),
    "lora": (lambda: Stack(*(LoRALinear() for _ in range(3))), tokens),
    "convolution": (lambda: Stack(*(ConvolutionBlock() for _ in range(3))), images),
}


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_bitwise_the_same(device, kind):
    build, make_input = MODELS[kind]
    model, x = build().to(device.torch_device), make_input(device.torch_device)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def steps():
        model.load_state_dict(state)
        torch.manual_seed(1)
        seen = []
        for _ in range(3):
            model.zero_grad()
            x.grad = None
            out = model(x)
            out.square().mean().backward()
            seen += [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        return [*seen, *(buffer.clone() for buffer in model.buffers())]

    expected = steps()
    with ActivationOffloader(model, min_bytes=64) as offloader:
        for got, wanted in zip(steps(), expected, strict=True):
            assert torch.equal(got, wanted)
        assert offloader.offloaded_bytes > 0


def test_shapes_may_change_every_step(device):
    model = Stack(Experts(), Experts()).to(device.torch_device)
    batches = [torch.randn(2, length, 32, device=device.torch_device) for length in (48, 16, 33, 48, 5)]

    def gradients():
        seen = []
        for batch in batches:
            model.zero_grad()
            model(batch).sum().backward()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return seen

    expected = gradients()
    with ActivationOffloader(model, min_bytes=64):
        for got, wanted in zip(gradients(), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler(device, trainee, dtype):
    scaler = torch.amp.GradScaler(device.torch_device.type, enabled=dtype is torch.float16)

    def loss():
        with torch.autocast(device.torch_device.type, dtype=dtype):
            out = trainee.loss()
        return scaler.scale(out)

    def step():
        trainee.model.zero_grad()
        value = loss()
        value.backward()
        return [value.detach(), *(p.grad.clone() for p in trainee.model.parameters())]

    expected = step()
    with ActivationOffloader(trainee.model, min_bytes=1024):
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
