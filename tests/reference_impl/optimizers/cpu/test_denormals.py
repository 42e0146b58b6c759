# SPDX-License-Identifier: Apache-2.0
"""Denormal numbers: the CPU share treats them as the training thread does at each step."""

import copy

import pytest
import torch
from optimizer_training import hybrid
from torch import nn

from reference_impl import TrainableLayerStreamer
from reference_impl.optimizers.step import flushes_denormals

MODES = [False, True, True, False]


@pytest.fixture
def flush():
    """Switches the mode, of one thread, with which torch's own kernels do alone; skips where the CPU has none."""
    threads = torch.get_num_threads()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormal numbers")
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    yield torch.set_flush_denormal
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def test_the_mode_of_a_thread_is_read(flush):
    for mode in MODES:
        flush(mode)
        assert flushes_denormals() is mode


def train(parameter, optimizer, flush):
    """Second moments of gradients around 1e-20 are denormal."""
    for step, mode in enumerate(MODES):
        flush(mode)
        generator = torch.Generator().manual_seed(step)
        parameter.grad = 1e-20 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["gradients", "nothing"])
def test_second_moments_are_those_of_the_mode_at_each_step(flush, overlap):
    plain = nn.Parameter(torch.randn(1000))
    ours = copy.deepcopy(plain)
    adamw = torch.optim.AdamW([plain], lr=1e-2, fused=True)
    train(plain, adamw, flush)
    with hybrid(
        [ours], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, backward_overlap=overlap
    ) as optimizer:
        train(ours, optimizer, flush)
        flush(False)
        for name in ("exp_avg", "exp_avg_sq"):
            expected = adamw.state[plain][name]
            assert torch.equal(optimizer.state[ours][name], expected)
        assert 0 < int(expected.count_nonzero()) < 1000  # neither mode alone


class Blocks(nn.Module):
    """Layers with gradients scaled down until their squares are denormal."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return 1e-18 * hidden.square().mean()


def test_layers_that_stream_follow_it_too(flush):
    torch.manual_seed(0)
    plain = Blocks()
    model = copy.deepcopy(plain)
    data = torch.randn(len(MODES), 8, 32)

    def train(model, optimizer):
        for batch, mode in zip(data, MODES, strict=True):
            flush(False)
            loss = model(batch)
            flush(mode)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        getattr(optimizer, "synchronize", lambda: None)()
        flush(False)

    adamw, given = (torch.optim.AdamW(each.parameters(), fused=True) for each in (plain, model))
    train(plain, adamw)
    with TrainableLayerStreamer(model, given, split=(0.0, 0.0, 1.0)) as streamer:
        train(model, streamer.optimizer)
        states = streamer.optimizer.state_dict()["state"]
        for index, param in enumerate(plain.parameters()):
            expected = adamw.state[param]["exp_avg_sq"]
            assert torch.equal(states[index]["exp_avg_sq"], expected)
            assert int(expected.count_nonzero()) > 0
