# SPDX-License-Identifier: Apache-2.0
"""One kernel for all pieces of a chunk changes the bits that a kernel of each piece would."""

import weakref

import pytest
import torch

from reference_impl.device import CpuTwin, Device
from reference_impl.optimizers.algorithms import SGD, Adam
from reference_impl.optimizers.gradients.clip_decision import decide
from reference_impl.optimizers.layout import MASTER, Member
from reference_impl.optimizers.streamed import chunks, joined, packing, storage
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat

# Lengths that fill no block of 64, one piece longer than a chunk, and several chunks.
LENGTHS = (5, 64, 700, 129, 3, 1000, 64, 2500, 17)
FORMATS = {
    "halves": (torch.bfloat16, StateFormat(moments_dtype=torch.bfloat16, hi_lo_masters=True)),
    "masters": (torch.bfloat16, StateFormat(moments_dtype=torch.bfloat16)),
    "masters on the device": (
        torch.bfloat16,
        StateFormat(moments_dtype=torch.bfloat16, offload_masters=False),
    ),
    "fp16": (torch.float16, StateFormat(moments_dtype=torch.bfloat16)),
    "own masters": (torch.float32, StateFormat(moments_dtype=torch.bfloat16)),
}


class Compiles(CpuTwin):
    """A device that has kernels of its own, as CUDA has."""

    compiles = True

    def __init__(self):
        super().__init__(torch.device("cpu"))


def members_of(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(length, generator=generator).to(device, dtype) for length in LENGTHS]
    return [Member(weight, order % 2, order, resident=0) for order, weight in enumerate(weights)]


def groups_of(algorithm):
    first = {**algorithm.defaults, "lr": 1e-2, "weight_decay": 0.1}
    return [first, {**first, "lr": 3e-3, "weight_decay": 0.0}]


def trained(device, dtype, state_format, algorithm, *, count=9):
    """Four steps: of some members, of all, one that is skipped, and one of others; return weights and states."""
    members = members_of(dtype, device.torch_device)[:count]
    share = StreamedShare(device, algorithm, chunk_bytes=12 * 512, state_format=state_format)
    share.add({member: Part(streamed=range(member.param.numel())) for member in members})
    for step, some in enumerate((members[-8:], members, members, members[:6])):
        generator = torch.Generator().manual_seed(step)
        given = {
            member: torch.randn(member.param.shape, generator=generator).to(member.param) for member in some
        }
        if step == 2:
            given[members[-1]].fill_(float("nan"))
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in given.values()]
        nothing = dict.fromkeys(("reduce_norm_squared", "max_norm"))
        decision = decide(
            norms, device, **nothing, loss_scale=torch.ones((), device=device.torch_device), found_inf=None
        )
        share.update(given, decision if step else None, groups_of(algorithm))
        share.wait_for(members)
    share.finish(for_writing=False)
    names = [*algorithm.moments, *([] if dtype == torch.float32 else [MASTER])]
    found = {
        f"{member.order} {name}": torch.cat([part.cpu() for _, part in share.parts(member, name)])
        for member in members
        for name in names
    }
    found |= {f"{member.order} weight": member.param.detach().cpu() for member in members}
    share.close()
    return found


@pytest.fixture
def joins_all(monkeypatch):
    """Let chunks join that are not of shards, and count the kernels; eagerly, which is the same source."""
    counts = []

    def kernel(function, *kind):
        counts.append(function)
        return function

    monkeypatch.setattr(chunks, "DTensor", torch.Tensor)
    monkeypatch.setattr(packing, "compiled", kernel)
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    return counts


@pytest.mark.parametrize(
    ("name", "algorithm"), [*((name, Adam()) for name in FORMATS), ("masters", SGD()), ("own masters", SGD())]
)
def test_the_bits_are_those_of_one_kernel_a_piece(joins_all, name, algorithm):
    dtype, state_format = FORMATS[name]
    ours = trained(Compiles(), dtype, state_format, algorithm)
    assert set(joins_all) <= {joined.update_halved, joined.update_whole}
    count = len(joins_all)
    assert count > 4
    theirs = trained(CpuTwin(torch.device("cpu")), dtype, state_format, algorithm)
    assert len(joins_all) == count
    for key, state in theirs.items():
        assert torch.equal(ours[key], state), key


def test_a_chunk_is_one_kernel(joins_all):
    dtype, state_format = FORMATS["own masters"]
    device = Compiles()
    members = members_of(dtype)
    share = StreamedShare(device, Adam(), chunk_bytes=12 * 512, state_format=state_format)
    share.add({member: Part(streamed=range(member.param.numel())) for member in members})
    joins_all.clear()
    share.update({member: torch.ones_like(member.param) for member in members}, None, groups_of(Adam()))
    share.wait_for(members)
    share.finish(for_writing=False)
    assert len(joins_all) == len(share.chunks) < sum(len(chunk.pieces) for chunk in share.chunks)
    share.close()


def test_nothing_of_a_closed_share_stays(joins_all):
    dtype, state_format = FORMATS["halves"]
    members = members_of(dtype)
    share = StreamedShare(Compiles(), Adam(), chunk_bytes=12 * 512, state_format=state_format)
    share.add({member: Part(streamed=range(member.param.numel())) for member in members})
    share.update({member: torch.ones_like(member.param) for member in members}, None, groups_of(Adam()))
    share.wait_for(members)
    kept = [weakref.ref(chunk.storage) for chunk in share.chunks]
    share.close()
    assert kept
    assert all(each() is None for each in kept)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "halves" else ()) for name in FORMATS]
)
def test_no_kernel_is_built_in_a_step(monkeypatch, name):
    """Chunks of one piece and of many, a member alone, whatever the lengths: all have the kernel of the first."""
    built = []

    def counting(graph, inputs, *, options):
        # Not by processes of the compiler's own.
        assert options == {"compile_threads": 1}
        built.append(graph)
        return graph.forward

    compiling = torch.compile
    monkeypatch.setattr(chunks, "DTensor", torch.Tensor)
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    monkeypatch.setattr(
        torch, "compile", lambda *args, **kwargs: compiling(*args, backend=counting, **kwargs)
    )
    packing.compiled.cache_clear()
    for count in (9, 1, 2):
        trained(Compiles(), *FORMATS[name], Adam(), count=count)
    packing.compiled.cache_clear()
    assert len(built) == 1


def test_scratch_counts_in_the_budget(joins_all, monkeypatch):
    dtype, state_format = FORMATS["own masters"]
    members = members_of(dtype)
    options = {"chunk_bytes": 12 * 512, "device_budget_bytes": 3 * 12 * 512}
    share = StreamedShare(Compiles(), Adam(), **options, state_format=state_format)
    monkeypatch.setattr("reference_impl.optimizers.streamed.storage.DTensor", torch.Tensor)
    with pytest.raises(ValueError, match=r"expected \d+ or more: 3 chunks of 6144 bytes, and 12288 for"):
        share.add({member: Part(streamed=range(member.param.numel())) for member in members})
    share.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_follows_the_source(monkeypatch, name):
    """The CPU's compiler stands in for CUDA's, which may join products and sums: a number may round otherwise."""
    monkeypatch.setattr(chunks, "DTensor", torch.Tensor)
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    packing.compiled.cache_clear()
    assert_follows(name, Compiles())
    packing.compiled.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("name", FORMATS)
def test_cuda_follows_the_twin(monkeypatch, name):
    monkeypatch.setattr(chunks, "DTensor", torch.Tensor)
    assert_follows(name, Device.of("cuda"))


def assert_follows(name, device):
    dtype, state_format = FORMATS[name]
    ours = trained(device, dtype, state_format, Adam())
    theirs = trained(CpuTwin(torch.device("cpu")), dtype, state_format, Adam())
    for key, state in theirs.items():
        near = torch.isclose(ours[key].float(), state.float(), rtol=2**-7, atol=1e-6)
        assert (~near).sum() <= max(0.01 * state.numel(), 1), key
        torch.testing.assert_close(ours[key].float(), state.float(), rtol=2**-6, atol=0.02)
