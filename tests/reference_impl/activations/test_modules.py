# SPDX-License-Identifier: Apache-2.0
"""Module-level offload: the inputs of named modules."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.activations import ActivationOffloader

SMALL = {"min_bytes": 1024}
TOKENS = 2 * 128


@pytest.mark.parametrize("modules", [["core_attention"], ["mlp_norm", "down"], ["layers.0.qkv", "out"]])
def test_every_step_is_bitwise_the_same(trainee, modules):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, modules=modules, **SMALL) as offloader:
        for _ in range(3):
            assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0


def test_only_the_inputs_of_the_modules_move(trainee):
    with ActivationOffloader(trainee.model, modules=["down"], **SMALL) as offloader:
        trainee.step()
        assert offloader.offloaded_bytes == 4 * TOKENS * 176 * 4
    with ActivationOffloader(trainee.model, modules=["core_attention"], **SMALL) as offloader:
        trainee.step()
        assert offloader.offloaded_bytes == 4 * TOKENS * 3 * 64 * 4


def test_small_inputs_stay(trainee):
    with ActivationOffloader(trainee.model, modules=["down"], min_bytes=TOKENS * 176 * 4 + 1) as offloader:
        trainee.step()
        assert offloader.offloaded_bytes == 0


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_fraction_is_a_share_of_the_bytes(trainee, fraction):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, modules=["down"], fraction=fraction, **SMALL) as offloader:
        assert trainee.step() == expected
        assert offloader.offloaded_bytes == fraction * 4 * TOKENS * 176 * 4


def test_the_last_bytes_stay_from_the_second_run_on(trainee):
    one = TOKENS * 176 * 4
    with ActivationOffloader(trainee.model, modules=["down"], keep_last_bytes=2 * one, **SMALL) as offloader:
        trainee.step()
        assert offloader.offloaded_bytes == 4 * one
        trainee.step()
        assert offloader.offloaded_bytes == (4 + 2) * one


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_micro_batches_in_pipeline_order(trainee, rank):
    """Every rank of a pipeline runs as many forwards ahead as ranks follow it."""
    warm_up, delta_bytes = 2 - rank, TOKENS * 176 * 4

    def gradients():
        trainee.model.zero_grad()
        waiting = [trainee.loss() for _ in range(warm_up)]
        for _ in range(4 - warm_up):
            waiting.append(trainee.loss())
            waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
        return [p.grad.clone() for p in trainee.model.parameters()]

    expected = gradients()
    with ActivationOffloader(
        trainee.model, modules=["down"], keep_last_bytes=rank * delta_bytes, **SMALL
    ) as offloader:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert offloader.arena.live_bytes == 0


def test_recomputation_around_the_modules_still_recomputes(trainee):
    """The engine leaves unmoved tensors to the active outer checkpoint."""

    class Recomputed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    expected = trainee.step()
    for index, block in enumerate(trainee.model.layers):
        trainee.model.layers[index] = Recomputed(block)
    calls = []
    trainee.model.layers[0].block.up.register_forward_hook(lambda *_: calls.append(1))
    with ActivationOffloader(trainee.model, modules=["down"], **SMALL) as offloader:
        got = trainee.step()
        assert torch.equal(got.loss, expected.loss)
        for wanted, gradient in zip(expected.gradients.values(), got.gradients.values(), strict=True):
            assert torch.equal(wanted, gradient)
        assert len(calls) == 2
        assert offloader.offloaded_bytes == 4 * TOKENS * 176 * 4


def test_unknown_names_are_refused_with_the_nearest(trainee):
    with pytest.raises(ValueError, match=r"'core_attn' matches no module.*try 'core_attention'"):
        ActivationOffloader(trainee.model, modules=["core_attn"])


@pytest.mark.parametrize(
    "option", [{"fraction": 1.5}, {"fraction": -0.1}, {"keep_last_bytes": -1}, {"min_bytes": 0}]
)
def test_options_out_of_range_are_refused(trainee, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        ActivationOffloader(trainee.model, modules=["down"], **option)
