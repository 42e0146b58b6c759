# SPDX-License-Identifier: Apache-2.0
"""Every geometry a saved tensor can have comes back with the same values, strides and alignment."""

import pytest
import torch
from torch import nn

from reference_impl.activations.engine import SavedTensorEngine
from reference_impl.activations.geometry import is_plain
from reference_impl.activations.headroom import Headroom
from reference_impl.activations.policy import EvenFraction
from reference_impl.memory.arena import HostArena
from reference_impl.memory.tiers import HostTier


@pytest.fixture
def engine(device):
    arena = HostArena(device)
    yield SavedTensorEngine(device, HostTier(device, arena), headroom=Headroom(device), min_bytes=1)
    arena.close()


def round_trip(engine, tensor):
    """Save `tensor` through the engine, drop the copy on the device, and restore it."""
    kept = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, saved):
            ctx.save_for_backward(saved)
            return anchor.clone()

        @staticmethod
        def backward(ctx, gradient):
            kept.extend(ctx.saved_tensors)
            return gradient, None

    anchor = torch.zeros((), device=engine.device.torch_device, requires_grad=True)
    with engine.saving(nn.Module(), EvenFraction()):
        out = Save.apply(anchor, tensor)
    engine.headroom.in_flight.clear()
    out.backward()
    return kept[0]


def base(device):
    return torch.arange(4096, device=device, dtype=torch.float32).view(64, 64)


VIEWS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "offset slice": lambda t: t[8:],
    "small slice": lambda t: t[60:],
    "small slice off alignment": lambda t: t.flatten()[4001:4090],
    "column": lambda t: t[:, 3],
    "sparse grid": lambda t: t[::8, ::8],
    "few columns": lambda t: t[:8, 5:7],
    "expanded": lambda t: t[0].expand(32, 64),
    "expanded scalar": lambda t: t[0, 0].expand(100),
    "overlapping windows": lambda t: t.as_strided((10, 64), (16, 1)),
    "chunk": lambda t: t.chunk(8)[5],
    "complex real part": lambda t: torch.view_as_complex(t.view(64, 32, 2)).real,
    "bytes of another dtype": lambda t: t.view(torch.int16),
    "channels last": lambda t: t.view(4, 4, 16, 16).to(memory_format=torch.channels_last),
    "zero elements": lambda t: t[:0],
    "zero dimensions": lambda t: t[3, 4],
    "flipped": lambda t: t.flip(0),
    "boolean": lambda t: t > 100,
    "bfloat16": lambda t: t.bfloat16(),
    "lazy conjugate": lambda t: torch.view_as_complex(t.view(64, 32, 2)).conj(),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_comes_back_as_it_was(engine, device, kind):
    tensor = VIEWS[kind](base(device.torch_device))
    expected = tensor.clone()
    restored = round_trip(engine, tensor)
    assert restored.dtype == tensor.dtype
    assert restored.stride() == tensor.stride()
    assert torch.equal(restored, expected)


def test_sparse_tensors_are_left_alone(engine, device):
    tensor = base(device.torch_device).to_sparse()
    assert round_trip(engine, tensor).layout == tensor.layout
    assert engine.offloaded_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_plain(device):
    parts = [torch.ones(3, device=device.torch_device), torch.ones(2, device=device.torch_device)]
    assert not is_plain(torch.nested.nested_tensor(parts), device.torch_device)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_not_plain():
    quantized = torch.quantize_per_tensor(torch.ones(4), scale=0.1, zero_point=0, dtype=torch.qint8)
    assert not is_plain(quantized, torch.device("cpu"))


class Tagged(torch.Tensor):
    pass


def test_tensor_subclasses_are_left_alone(engine, device):
    tensor = base(device.torch_device).as_subclass(Tagged)
    assert type(round_trip(engine, tensor)) is Tagged
    assert engine.offloaded_bytes == 0


def test_a_small_view_of_a_large_storage_moves_only_itself(engine, device):
    round_trip(engine, base(device.torch_device)[60:])
    assert engine.offloaded_bytes == 4 * 64 * 4


class Projection(nn.Module):
    """Saves the three thirds of one storage, and the storage itself."""

    def forward(self, x):
        q, k, v = (x * 2).chunk(3, dim=-1)
        return (q * k * v).sum() + (q.exp() * k.sin()).sum()


def test_a_storage_crosses_once_however_many_tensors_view_it(engine, device):
    x = torch.randn(64, 96, device=device.torch_device, requires_grad=True)
    module = Projection()
    with engine.saving(module, EvenFraction()):
        y = (x * 2).exp()
        out = (y * y).sum() + (y.t() * 3).square().sum()
    # y, saved by exp and by both factors of the product, and the scaled transpose.
    assert engine.offloaded_bytes == 2 * 64 * 96 * 4
    del y
    out.backward()
    with engine.saving(module, EvenFraction()):
        before = engine.offloaded_bytes
        out = module(x)
    saved_storages = 4  # the projection, q * k, exp(q) and sin(k)
    assert engine.offloaded_bytes - before <= saved_storages * 64 * 96 * 4


def test_one_buffer_serves_all_views_of_a_storage(engine, device):
    seen = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *saved):
            ctx.save_for_backward(*saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return gradient, None, None, None

    x = torch.zeros(1, device=device.torch_device, requires_grad=True)
    with engine.saving(nn.Module(), EvenFraction()):
        out = Save.apply(x, *torch.randn(64, 96, device=device.torch_device).chunk(3, dim=-1))
    engine.headroom.in_flight.clear()
    out.backward()
    assert len({t.untyped_storage().data_ptr() for t in seen}) == 1


def test_storages_that_reuse_an_address_are_not_merged(engine, device):
    tokens, expected = [], []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            tokens.append(ctx.saved_tensors[0])
            return gradient, None

    x = torch.zeros(1, device=device.torch_device, requires_grad=True)
    outs = []
    for value in range(8):
        tensor = torch.full((4096,), float(value), device=device.torch_device)
        expected.insert(0, tensor.clone())
        with engine.saving(nn.Module(), EvenFraction()):
            outs.append(Save.apply(x, tensor))
        del tensor
        engine.headroom.in_flight.clear()
    sum(outs).backward()
    assert sorted(t[0].item() for t in tokens) == sorted(t[0].item() for t in expected)
