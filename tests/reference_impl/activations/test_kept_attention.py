# SPDX-License-Identifier: Apache-2.0
"""Attention kept during its layer's recomputation: any kernel's, of whole and of packed sequences."""

import importlib
from itertools import pairwise, starmap

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.activations import CheckpointOffloader
from reference_impl.activations import checkpoint as module
from reference_impl.sequences.divided import KernelCalls

SMALL = {"min_bytes": 1024}


class CountAttention(TorchDispatchMode):
    """Counts the forward kernels of attention that run."""

    def __init__(self, name="attention"):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.name in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """SDPA of four heads, between dropouts."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return functional.dropout(self.out(x.transpose(1, 2).flatten(2)).sin(), 0.25)


def attending(device, dropout=0.0):
    torch.manual_seed(5)
    model = nn.Sequential(*(Attention(dropout) for _ in range(3))).to(device.torch_device)
    x = torch.randn(2, 64, 32, device=device.torch_device, requires_grad=True)

    def step():
        torch.manual_seed(7)
        model.zero_grad()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return [loss, gradient, *(param.grad.clone() for param in model.parameters())]

    return model, step


def test_kept_attention_is_not_computed_again_and_the_bits_stay(device):
    model, step = attending(device)
    expected = step()
    counted = []
    for keep_attention in (False, True, 2, 0):
        with (
            CheckpointOffloader(
                model, layers=list(model), keep_attention=keep_attention, **SMALL
            ) as offloader,
            CountAttention() as counter,
        ):
            assert all(map(torch.equal, step(), expected))
            counted.append((counter.count, offloader.offloaded_bytes))
    # Each of two backwards computes every layer again.
    assert [count for count, _ in counted] == [9, 3, 5, 9]
    out_and_logsumexp = 2 * 64 * 32 * 4 + 2 * 64 * 4 * 4
    kept_bytes = [bytes_ - counted[0][1] for _, bytes_ in counted]
    assert kept_bytes == [0, 3 * out_and_logsumexp, 2 * out_and_logsumexp, 0]


@pytest.mark.parametrize("keep_attention", [4, -1, 0.5, "all"])
def test_attention_is_kept_in_all_layers_or_so_many_of_them(device, keep_attention):
    model, _ = attending(device)
    with pytest.raises(
        ValueError, match="expected True, False, or how many of the 3 layers keep it; try True"
    ):
        CheckpointOffloader(model, layers=list(model), keep_attention=keep_attention)


def by_document(query, key, value, ends, *_):
    """The kernel of torch's varlen_attn, of a few positions, where there is no GPU: rows (tokens, heads, features)."""
    outputs, logsumexps = [], []
    for document in starmap(slice, pairwise(ends.tolist())):
        q, k, v = (each[document].transpose(0, 1) for each in (query, key, value))
        outputs.append((scores(q, k).softmax(-1) @ v).transpose(0, 1))
        logsumexps.append(scores(q, k).logsumexp(-1))
    return torch.cat(outputs), torch.cat(logsumexps, 1), torch.zeros(2, dtype=torch.uint64)


def scores(q, k):
    found = q @ k.mT / q.shape[-1] ** 0.5
    return found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf)


def by_document_backward(gradient, query, key, value, out, logsumexp, ends, *_):
    found = []
    for document in starmap(slice, pairwise(ends.tolist())):
        g, q, k, v = (each[document].transpose(0, 1) for each in (gradient, query, key, value))
        shares = scores(q, k).softmax(-1)
        of_shares = g @ v.mT
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        found.append([each.transpose(0, 1) for each in (of_scores @ k, of_scores.mT @ q, shares.mT @ g)])
    return tuple(map(torch.cat, zip(*found, strict=True)))


class PackedAttention(Attention):
    """Of three documents in one row, by torch's own kernel for them."""

    def __init__(self, varlen_attn):
        super().__init__()
        self.varlen_attn = varlen_attn

    def forward(self, x):
        ends = torch.tensor([0, 20, 50, 64], dtype=torch.int32)
        q, k, v = (each[0].unflatten(-1, (4, 8)) for each in self.qkv(x).chunk(3, -1))
        x = self.varlen_attn(q, k, v, ends, ends, 30, 30, window_size=(-1, 0)).flatten(1)[None]
        return self.out(x).sin()


def test_attention_of_packed_documents_is_kept():
    varlen = pytest.importorskip(
        "torch.nn.attention.varlen", reason="this torch has no attention of packed documents"
    )
    kernels = torch.library.Library("torch_attn", "IMPL")
    try:
        kernels.impl("_varlen_attn", by_document, "CPU")
        kernels.impl("_varlen_attn_backward", by_document_backward, "CPU")
        torch.manual_seed(5)
        model = nn.Sequential(*(PackedAttention(varlen.varlen_attn) for _ in range(3)))
        x = torch.randn(1, 64, 32, requires_grad=True)

        def step():
            model.zero_grad()
            model(x).square().mean().backward()
            return [param.grad.clone() for param in model.parameters()]

        expected, counted = step(), []
        for keep_attention in (False, True):
            with (
                CheckpointOffloader(model, layers=list(model), keep_attention=keep_attention, **SMALL),
                CountAttention("varlen_attn") as counter,
            ):
                assert all(map(torch.equal, step(), expected))
            counted.append(counter.count)
        assert counted == [6, 3]
    finally:
        kernels._destroy()


@torch.library.custom_op("offload_test::attend", mutates_args=())
def attend(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return x * (torch.rand_like(x) > dropout_p)


attend.register_autograd(
    lambda context, gradient: (gradient * (context.saved_tensors[0] != 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_random_numbers_behind_kept_attention_are_those_of_the_first_call(device, monkeypatch):
    """The CPU's attention has no kernel with dropout, so one that takes random numbers stands in for it."""
    monkeypatch.setattr(module, "KEPT_ATTENTION", {"offload_test::attend"})
    model, step = attending(device, dropout=0.5)
    for layer in model:
        layer.out.register_forward_hook(lambda _, __, output: attend(output, 0.5))
    expected = step()
    with (
        CheckpointOffloader(model, layers=list(model), keep_attention=True, **SMALL),
        CountAttention("attend") as counter,
    ):
        assert all(map(torch.equal, step(), expected))
    assert counter.count == 3


class CountInside(CountAttention):
    """Counts the kernels of compiled code too."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


@pytest.fixture
def compilers():
    """No frame that another test has compiled or skipped."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_run_compiled_and_keep_their_attention(device, compilers, backend):
    found = []
    for keep_attention in (False, True, 2):
        model, _ = attending(device)
        for layer in model:
            layer.compile(backend=backend)
        with CheckpointOffloader(model, layers=list(model), keep_attention=keep_attention, **SMALL):
            for seed in range(3):
                torch.manual_seed(seed)
                model.zero_grad()
                with CountInside() as counter:
                    loss = model(torch.randn(2, 64, 32, device=device.torch_device)).square().mean()
                    loss.backward()
        found.append((loss, *(param.grad for param in model.parameters()), counter.count))
    plain, *kept = found
    assert compilers["ok"] > 0
    assert compilers["ok"] == compilers["total"]
    assert all(torch.equal(*pair) for each in kept for pair in zip(plain[:-1], each[:-1], strict=True))
    assert [each[-1] for each in found] == [6, 3, 4]


class Frozen(nn.Module):
    """Attention whose output no backward needs, so that compiled code writes its next results over it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.trained = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)
        self.qkv.requires_grad_(False)
        self.out.requires_grad_(False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.trained((x + self.out(attended.transpose(1, 2).flatten(2).sin())).square()).sin()


@pytest.mark.slow
def test_compiled_code_may_write_over_kept_attention(device, compilers):
    found = []
    for keep_attention in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(Frozen(), Frozen()).to(device.torch_device)
        for layer in model:
            layer.compile()
        # So small a tensor stays where it is.
        with CheckpointOffloader(model, layers=list(model), keep_attention=keep_attention, min_bytes=2**30):
            model(torch.randn(2, 64, 32, device=device.torch_device)).square().mean().backward()
        found.append([layer.trained.weight.grad for layer in model])
    assert all(map(torch.equal, *found))


@pytest.fixture
def graphs():
    """CUDA graphs by device, as inductor registers them for a thread and its backward."""
    # Inductor's own: one that only the thread's storage held would be freed after Python has ended.
    found = importlib.import_module("torch._inductor.cudagraph_trees").local.tree_manager_containers
    yield found
    found.clear()


def test_no_compiled_code_runs_where_it_may_be_replayed(device, compilers, graphs):
    """A CUDA graph calls no kernel that could be kept, or heard of."""
    assert KernelCalls(print).ignore_compile_internals()
    graphs[0] = "one"
    model, step = attending(device)
    expected = step()
    for layer in model:
        layer.compile(backend="eager")
    with (
        CheckpointOffloader(model, layers=list(model), keep_attention=True, **SMALL),
        CountInside() as counter,
    ):
        assert all(map(torch.equal, step(), expected))
    assert not compilers["ok"]
    assert counter.count == 3
    assert not KernelCalls(print).ignore_compile_internals()


def test_attention_beside_kept_modules(trainee):
    expected = trainee.step()
    for keep in (["core_attention"], ["qkv", "gate"]):
        with CheckpointOffloader(trainee.model, keep=keep, keep_attention=True, **SMALL):
            for _ in range(2):
                assert trainee.step() == expected
