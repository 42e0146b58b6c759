# SPDX-License-Identifier: Apache-2.0
"""Another formula of matrices behind the same seam: Dion, against its published formula in double precision."""

import copy
import math

import pytest
import torch

from reference_impl import HybridDeviceOptimizer, Streaming
from reference_impl.optimizers import Dion

OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}


def published(weights, gradients, rank, *, lr, momentum, weight_decay):
    """Algorithm 1 of arXiv 2504.05295 for one matrix, over the gradients of all steps, scaled; in double precision."""
    weight = weights.double()
    rows, columns = weight.shape
    left_over = torch.zeros_like(weight)
    place = torch.arange(columns, dtype=torch.float64) + 0.5
    right = torch.cos(math.pi / columns * torch.outer(place, torch.arange(rank, dtype=torch.float64)))
    for gradient in gradients:
        momentum_now = left_over + gradient.double()
        left = torch.linalg.qr(momentum_now @ right).Q
        projected = momentum_now.T @ left
        left_over = momentum_now - (1 - momentum) * left @ projected.T
        right = projected / projected.norm(dim=0, keepdim=True)
        weight = weight - lr * weight_decay * weight - lr * math.sqrt(rows / columns) * left @ right.T
    return weight, left_over, right


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 24)])
@pytest.mark.parametrize("rank_fraction", [1.0, 0.25])
def test_it_follows_the_published_formula(device, shape, rank_fraction):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device.torch_device))
    before = weight.detach().cpu().clone()
    gradients = [torch.randn(shape, generator=generator) for _ in range(4)]
    group = {"params": [weight], "algorithm": Dion(), "rank_fraction": rank_fraction, **OPTIONS}
    with HybridDeviceOptimizer([group], split=(0, 1, 0), streaming=Streaming(chunk_bytes=4096)) as optimizer:
        for gradient in gradients:
            weight.grad = gradient.to(device.torch_device)
            optimizer.step()
        states = {name: optimizer.state[weight][name].cpu() for name in Dion().moments}
        matrices = [before] if before.dim() == 2 else list(before)
        for index, matrix in enumerate(matrices):
            here = index if before.dim() == 3 else ...
            rank = round(rank_fraction * min(matrix.shape))
            expected = published(matrix, [gradient[here] for gradient in gradients], rank, **OPTIONS)
            factor = states["right_factor"][here]
            assert not factor[rank:].count_nonzero()
            found = (weight.detach().cpu()[here], states["momentum_buffer"][here], factor[:rank].T)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)


def test_however_it_is_cut_it_is_the_same_and_resumes(device):
    torch.manual_seed(1)
    first = [torch.nn.Parameter(torch.randn(32, 48).bfloat16().to(device.torch_device)) for _ in range(5)]
    second = copy.deepcopy(first)
    gradients = [[torch.randn_like(param) for param in first] for _ in range(4)]

    def train(optimizer, params, steps):
        for given in steps:
            for param, gradient in zip(params, given, strict=True):
                param.grad = gradient.clone()
            optimizer.step()

    def made(params, **options):
        return HybridDeviceOptimizer(params, algorithm=Dion(), max_grad_norm=1.0, **OPTIONS, **options)

    with made(first, split=(0, 1, 0)) as one, made(second, split=(0.4, 0.6, 0)) as other:
        train(one, first, gradients)
        train(other, second, gradients[:2])
        saved = other.state_dict()
        with made(third := copy.deepcopy(second), split=(1, 0, 0)) as resumed:
            resumed.load_state_dict(saved)
            train(resumed, third, gradients[2:])
        for ours, theirs in zip(first, third, strict=True):
            assert torch.equal(ours, theirs)
