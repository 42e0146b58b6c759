# SPDX-License-Identifier: Apache-2.0
"""Matrices of one shape in one call: only where a trial says that the bits are those of one call each."""

import pytest
import torch
from muon_reference import ADAMW, MUON, MasterMuon
from stacked_products import one_by_one
from torch import nn

from reference_impl import HybridDeviceOptimizer, Streaming
from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Muon
from reference_impl.optimizers.streamed import batches, matrices
from reference_impl.optimizers.streamed.batches import Batches, MatrixKind

BOTH = pytest.mark.parametrize("states", ["exact", "bf16-moments"])


class Net(nn.Module):
    """One long matrix, in whose scratch others of equal shapes fit together: wide, tall, transposed and in stacks."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(29, 32, dtype=dtype)
        self.long = nn.Parameter(torch.randn(512, 64, dtype=dtype) / 8)
        self.wide = nn.ParameterList(torch.randn(32, 48, dtype=dtype) / 6 for _ in range(7))
        self.tall = nn.ParameterList(torch.randn(64, 32, dtype=dtype) / 6 for _ in range(3))
        self.turned = nn.ParameterList((torch.randn(64, 32, dtype=dtype) / 6).t() for _ in range(2))
        self.experts = nn.Parameter(torch.randn(5, 32, 48, dtype=dtype) / 6)
        self.unused = nn.Parameter(torch.randn(32, 48, dtype=dtype))


def trained(model, optimizer, device, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in model.parameters():
            if param is not model.unused:
                noise = torch.randn(param.shape, generator=generator).to(param)
                param.grad = torch.empty_like(param).copy_(noise)
        optimizer.step()
        optimizer.zero_grad()


def hybrid(model, *, states="exact", chunk_bytes=2**16):
    whole = [param for param in model.parameters() if param is not model.embed.weight]
    groups = [{"params": whole, "use_muon": True, **MUON}, {"params": [model.embed.weight], **ADAMW}]
    streaming = Streaming(states=states, chunk_bytes=chunk_bytes)
    return HybridDeviceOptimizer(groups, split=(0.3, 0.7, 0), streaming=streaming, max_grad_norm=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batches_have_the_bits_of_torchs_muon(device, monkeypatch, dtype):
    lengths = None if device.is_accelerator else one_by_one(monkeypatch.setattr)
    model, plain = (Net(dtype).to(device.torch_device) for _ in range(2))
    with hybrid(model) as optimizer:
        trained(model, optimizer, device)
        trained(plain, MasterMuon(plain, max_grad_norm=1.0, **MUON), device)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
    if lengths is not None:
        assert max(lengths) > 4, "matrices of one shape run together"


@BOTH
def test_a_step_that_is_skipped_keeps_all_and_chunks_change_no_bit(device, monkeypatch, states):
    if not device.is_accelerator:
        one_by_one(monkeypatch.setattr)
    first, second = (Net(torch.bfloat16).to(device.torch_device) for _ in range(2))
    with (
        hybrid(first, states=states) as optimizer,
        hybrid(second, states=states, chunk_bytes=2**13) as other,
    ):
        trained(first, optimizer, device, steps=3)
        trained(second, other, device, steps=3)
        kept = {name: param.detach().clone() for name, param in first.named_parameters()}
        for param in first.parameters():
            param.grad = torch.full_like(param, float("inf"))
        optimizer.step()
        optimizer.synchronize()
        other.synchronize()
        for (name, param), its in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(param, kept[name]), name
            assert torch.equal(param, its), name


def test_a_batch_whose_bits_differ_is_not_used(device, monkeypatch):
    """As a library's other kernel would make them."""
    one_by_one(monkeypatch.setattr)
    exact = torch.bmm

    def rounded_otherwise(one, other, *, out):
        exact(one, other, out=out)
        out[-1, 0, 0].mul_(1.0078125)

    found, kind = Batches(device), MatrixKind(Muon(), (24, 40), (40, 1))
    buffer = torch.empty(2**20, dtype=torch.uint8, device=device.torch_device)
    found.learn([[kind] * 6], buffer, 0)
    other = kind._replace(shape=(40, 24))
    assert list(found.of([kind, other, *[kind] * 5])) == [(kind, [0, 2, 3, 4, 5, 6]), (other, [1])]
    # Four have not been tried: a kernel may depend on how many there are.
    assert list(found.of([kind] * 4)) == [(kind, [place]) for place in range(4)]
    monkeypatch.setattr(torch, "bmm", rounded_otherwise)
    found = Batches(device)
    found.learn([[kind] * 6], buffer, 0)
    assert list(found.of([kind] * 6)) == [(kind, [place]) for place in range(6)]


def test_matrices_too_small_for_a_trial_to_say_anything_have_no_batches(device, monkeypatch):
    """A rounding that differs once in a thousand elements is not found among fewer."""
    one_by_one(monkeypatch.setattr)
    monkeypatch.setattr(batches, "_TRIED_ELEMENTS", 24 * 40 * 6 * 8)
    buffer = torch.empty(2**20, dtype=torch.uint8, device=device.torch_device)
    found, kind = Batches(device), MatrixKind(Muon(), (24, 40), (40, 1))
    found.learn([[kind] * 6, [kind] * 5], buffer, 0)
    assert found._exact == {(kind, 6): True, (kind, 5): False}


@pytest.mark.cuda
def test_matrices_of_some_size_have_batches_on_a_gpu():
    device = Device.of("cuda")
    buffer = torch.empty(2**26, dtype=torch.uint8, device=device.torch_device)
    found, kind = Batches(device), MatrixKind(Muon(), (256, 512), (512, 1))
    found.learn([[kind] * 8], buffer, 0)
    assert found._exact == {(kind, 8): True}


def test_batches_take_no_more_scratch_than_the_longest_matrix(device, monkeypatch):
    if not device.is_accelerator:
        one_by_one(monkeypatch.setattr)
    model = Net(torch.bfloat16).to(device.torch_device)
    with hybrid(model) as optimizer:
        update = optimizer._engine.open.streamed._pipeline._update._matrices
        longest = matrices.matrix_work_bytes(optimizer.members.values(), widens=False)
        assert update._buffer.numel() == longest
        assert update._batches._exact
        for kind, count in update._batches._exact:
            assert kind.bytes_of(count, 0) <= longest
