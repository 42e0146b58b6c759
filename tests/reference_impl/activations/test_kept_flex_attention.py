# SPDX-License-Identifier: Apache-2.0
"""Flex attention kept during its layer's recomputation: the operator, and the kernel that inductor makes of it."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.activations import CheckpointOffloader
from reference_impl.device import Device

SMALL = {"min_bytes": 1024}
STEPS, LAYERS, TOKENS, HEADS, FEATURES = 2, 3, 128, 4, 16


class CountFlex(TorchDispatchMode):
    """Counts the calls of the operator."""

    supports_higher_order_operators = True
    count = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == "flex_attention"
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """Attention with keys and values of half as many heads, a trained bias by distance and the logsumexp's gradient."""

    def __init__(self, attend):
        super().__init__()
        self.qkv = nn.Linear(HEADS * FEATURES, 2 * HEADS * FEATURES)
        self.out = nn.Linear(HEADS * FEATURES, HEADS * FEATURES)
        self.slopes = nn.Parameter(torch.linspace(-0.1, 0.1, HEADS))
        self.attend = attend

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (-1, FEATURES)).transpose(1, 2)
            for each in self.qkv(x).split([HEADS * FEATURES, *2 * [HEADS * FEATURES // 2]], -1)
        )
        slopes = self.slopes
        out, logsumexp = self.attend(
            q,
            k,
            v,
            score_mod=lambda score, _, head, row, column: score + slopes[head] * (row - column),
            block_mask=flex.create_block_mask(
                lambda _, __, row, column: row >= column, None, None, TOKENS, TOKENS, x.device
            ),
            enable_gqa=True,
            return_lse=True,
        )
        return self.out((out * logsumexp[..., None].sigmoid()).transpose(1, 2).flatten(2)).sin()


def trained(device, attend, keep_attention, counter, compile_layers=None):
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer(attend) for _ in range(LAYERS))).to(device.torch_device)
    if compile_layers is not None:
        for layer in model:
            layer.compile(backend=compile_layers)
    with CheckpointOffloader(model, layers=list(model), keep_attention=keep_attention, **SMALL) as offloader:
        for _ in range(STEPS):
            model.zero_grad()
            with counter() as counted:
                loss = (
                    model(torch.randn(2, TOKENS, HEADS * FEATURES, device=device.torch_device))
                    .square()
                    .mean()
                )
                loss.backward()
        found = [loss.detach(), *(param.grad for param in model.parameters())]
        return found, counted.count, offloader.offloaded_bytes


@pytest.mark.parametrize("how", ["uncompiled", "compiled", "in a compiled layer"])
def test_flex_attention_is_called_once_and_the_bits_stay(device, monkeypatch, how):
    # A CPU has the operator's backward, and the function refuses it.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    attend = (
        torch.compile(flex.flex_attention, backend="aot_eager") if how == "compiled" else flex.flex_attention
    )
    layers = "aot_eager" if how == "in a compiled layer" else None
    (plain, twice, without), *kept = (
        trained(device, attend, keep, CountFlex, layers) for keep in (False, True, 1)
    )
    assert all(torch.equal(*pair) for found, _, _ in kept for pair in zip(plain, found, strict=True))
    assert [twice, *(count for _, count, _ in kept)] == [2 * LAYERS, LAYERS, 2 * LAYERS - 1]
    # Output, logsumexp and the scores' maxima.
    layer_bytes = STEPS * 2 * TOKENS * HEADS * (FEATURES + 1 + 1) * 4
    assert [bytes_ - without for _, _, bytes_ in kept] == [LAYERS * layer_bytes, layer_bytes]


class Launcher:
    """Stands for inductor's launcher of Triton kernels, and for the kernel that it is given."""

    def __init__(self, names, **options):
        self.triton_meta = {"signature": dict.fromkeys(names, "*fp32")}
        self.inductor_meta = {"config_args": options}
        self.count = 0

    def run(self, q, k, logsumexp, maxima, out, *, stream, benchmark_run=False):
        self.count += 1
        out.copy_(q * k)
        logsumexp.copy_(q.sum(-1))
        maxima.copy_(k.sum(-1))


FORWARD = ("arg_Q", "arg_K", "arg_LSE", "arg_MAX", "out_ptr0")


class Compiled(torch.autograd.Function):
    """Stands for compiled code: it writes over the output, and its backward needs all that the kernel wrote."""

    @staticmethod
    def forward(ctx, q, k, kernel):
        out, logsumexp, maxima = torch.empty_like(q), q.new_empty(q.shape[:-1]), q.new_empty(q.shape[:-1])
        kernel.run(q, k, logsumexp, maxima, out, stream=0)
        # Without a trace in the tensor's version.
        out.data.sin_()
        ctx.save_for_backward(q, k, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, out, logsumexp = ctx.saved_tensors
        shared = gradient * out * logsumexp[..., None]
        return shared * k, shared * q, None


class Launching(nn.Module):
    def __init__(self, kernel, compiles=lambda: None):
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(32, 32) for _ in range(3))
        self.kernel, self.compiles = kernel, compiles

    def forward(self, x):
        self.compiles()
        return self.out(Compiled.apply(self.q(x), self.k(x), self.kernel)).sin()


LAUNCHER_MODULE = "torch._inductor.runtime.triton_heuristics"


@pytest.fixture
def launcher(monkeypatch):
    """A new class, in the place of inductor's."""
    found = type("CachingAutotuner", (Launcher,), {"run": Launcher.run})
    monkeypatch.setitem(sys.modules, LAUNCHER_MODULE, SimpleNamespace(CachingAutotuner=found))
    return found


def launches(device, kernel, keep_attention, compiles=lambda: None, min_bytes=16):
    """Return a step's loss and gradients, how often its kernel was launched, and the bytes on the host."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Launching(kernel, compiles) for _ in range(LAYERS))).to(device.torch_device)
    x = torch.randn(2, 64, 32, device=device.torch_device)
    before = kernel.count
    with CheckpointOffloader(
        model, layers=list(model), keep_attention=keep_attention, min_bytes=min_bytes
    ) as offloader:
        loss = model(x).square().mean()
        loss.backward()
        found = [loss.detach(), *(param.grad for param in model.parameters())]
        return found, kernel.count - before, offloader.offloaded_bytes


ROW_BYTES, OUT_BYTES = 2 * 64 * 4, 2 * 64 * 32 * 4
KERNELS = {
    "forward": (FORWARD, {"OUTPUT_MAX": False}, LAYERS, OUT_BYTES + ROW_BYTES),
    "with the scores' maxima": (FORWARD, {"OUTPUT_MAX": True}, LAYERS, OUT_BYTES + 2 * ROW_BYTES),
    "backward": (("arg_Q", "arg_DO", "arg_LSE", "arg_DQ", "out_ptr0"), {}, 2 * LAYERS, 0),
    "with another output": (("arg_Q", "arg_K", "arg_LSE", "out_ptr0", "out_ptr1"), {}, 2 * LAYERS, 0),
    "few queries": (("arg_Q", "arg_K", "arg_M", "arg_L", "out_ptr0"), {}, 2 * LAYERS, 0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_inductor_is_launched_once_and_the_bits_stay(device, launcher, name):
    names, options, expected, layer_bytes = KERNELS[name]
    kernel = launcher(names, **options)
    plain, twice, without = launches(device, kernel, keep_attention=False)
    found, count, with_ = launches(device, kernel, keep_attention=True)
    assert (twice, count, with_ - without) == (2 * LAYERS, expected, LAYERS * layer_bytes)
    assert all(map(torch.equal, plain, found))


def test_compiled_code_may_write_over_a_kept_output(device, launcher):
    kernel = launcher(FORWARD)
    plain, _, _ = launches(device, kernel, keep_attention=False)
    # So small a tensor stays where it is.
    found, count, _ = launches(device, kernel, keep_attention=True, min_bytes=2**30)
    assert count == LAYERS
    assert all(map(torch.equal, plain, found))


def test_a_kernel_that_was_compiled_in_the_first_call_is_launched_again_once(device, launcher, monkeypatch):
    module = sys.modules[LAUNCHER_MODULE]
    kernel = launcher(FORWARD)
    plain, _, _ = launches(device, kernel, keep_attention=False)
    monkeypatch.delitem(sys.modules, LAUNCHER_MODULE)
    found, count, _ = launches(
        device,
        kernel,
        keep_attention=True,
        compiles=lambda: monkeypatch.setitem(sys.modules, LAUNCHER_MODULE, module),
    )
    assert count == LAYERS + 1
    assert all(map(torch.equal, plain, found))


def test_of_torchs_kernels_flex_attentions_forward_alone_has_these_arguments():
    import torch._inductor.runtime.triton_heuristics as heuristics

    assert callable(heuristics.CachingAutotuner.run)
    arguments = {}
    for path in (Path(torch.__file__).parent / "_inductor/kernel").rglob("*.jinja"):
        # Others are not Triton's.
        if "tl.program_id" in (text := path.read_text()):
            arguments[path.name] = re.findall(r"\w+", re.search(r"def_kernel\((.*?)\)", text)[1])
    has = [name for name, each in arguments.items() if "LSE" in each and "DO" not in each]
    assert has == ["flex_attention.py.jinja"]
    assert "MAX" in arguments["flex_attention.py.jinja"]


class CountKernels:
    """Counts launches of inductor's kernel on a GPU."""

    def __enter__(self):
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error):
        torch.cuda.synchronize()
        self.profiler.__exit__(*error)
        names = [event.name for event in self.profiler.events()]
        self.count = sum(
            re.search("triton_tem.*flex_attention(?!_backward)", name) is not None for name in names
        )


@pytest.mark.cuda
@pytest.mark.parametrize("layers", [None, "inductor"])
def test_compiled_flex_attention_is_launched_once_on_a_gpu(layers):
    device = Device.of("cuda")
    attend = flex.flex_attention if layers else torch.compile(flex.flex_attention)
    (plain, twice, without), (found, once, with_) = (
        trained(device, attend, keep, CountKernels, layers) for keep in (False, True)
    )
    assert (twice, once) == (2 * LAYERS, LAYERS)
    assert with_ - without == STEPS * LAYERS * 2 * TOKENS * HEADS * (FEATURES + 1) * 4
    # The slopes' gradients are sums of atomic additions, in any order.
    names = [
        "loss",
        *(name for name, _ in nn.Sequential(*(Layer(None) for _ in range(LAYERS))).named_parameters()),
    ]
    for name, *pair in zip(names, plain, found, strict=True):
        assert name.endswith("slopes") or torch.equal(*pair)
