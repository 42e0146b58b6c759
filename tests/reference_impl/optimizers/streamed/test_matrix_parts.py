# SPDX-License-Identifier: Apache-2.0
"""The kernels before and behind Muon's products: the bits of operators, or no kernels.

On the twin Triton interprets them. Sizes are those that the operators of CPUs take in whole vectors: of the last few
elements these round sums of products twice.
"""

import pytest
import torch
from muon_reference import ADAMW, MUON, MasterMuon
from torch import nn

from reference_impl import HybridDeviceOptimizer, Streaming
from reference_impl.optimizers.streamed import matrix_parts
from reference_impl.optimizers.streamed.matrix_parts import Kernels

# Before and behind, in four cases.
TRIED = 8


@pytest.fixture
def kernels(device, request, monkeypatch):
    """Names the kernels as they are launched: those of a GPU, or interpreted ones, whose fma rounds once as a GPU's."""
    if device.is_accelerator:
        from reference_impl.optimizers.streamed import muon_kernel as kernel
    else:
        kernel = request.getfixturevalue("interpreted")("muon_kernel")
        monkeypatch.setattr(type(device), "compiles", True)
        monkeypatch.setattr(matrix_parts, "_SHAPES", ((16, 128), (128, 16)))
        round_once(monkeypatch)
    launched = []

    def watched(name, run):
        monkeypatch.setattr(kernel, name, lambda *given: (launched.append(name), run(*given)))

    for name in ("before", "after"):
        watched(name, getattr(kernel, name))
    return launched


def round_once(monkeypatch):
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype("float32"), x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


class Net(nn.Module):
    """Matrices that are wide, tall and transposed, and a stack of two."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(32, 32, dtype=torch.bfloat16)
        self.wide = nn.Parameter(torch.randn(32, 64, dtype=torch.bfloat16) / 8)
        self.tall = nn.Parameter(torch.randn(64, 32, dtype=torch.bfloat16) / 8)
        self.turned = nn.Parameter((torch.randn(64, 32, dtype=torch.bfloat16) / 8).t())
        self.experts = nn.Parameter(torch.randn(2, 32, 32, dtype=torch.bfloat16) / 8)
        self.unused = nn.Parameter(torch.randn(32, 64, dtype=torch.bfloat16))


def trained(model, optimizer, *, first=0, steps=3, factor=1.0):
    generator = torch.Generator().manual_seed(first)
    for _ in range(steps):
        for param in model.parameters():
            if param is not model.unused:
                noise = torch.randn(param.shape, generator=generator).to(param)
                param.grad = torch.empty_like(param).copy_(noise * factor)
        optimizer.step()
        optimizer.zero_grad()


def hybrid(model, *, states="exact", max_grad_norm=0.5, **muon):
    whole = [param for param in model.parameters() if param is not model.embed.weight]
    groups = [{"params": whole, "use_muon": True, **MUON, **muon}]
    if states == "exact":
        # Of rounded moments torch compiles a kernel, which takes a minute.
        groups.append({"params": [model.embed.weight], **ADAMW})
    streaming = Streaming(states=states, chunk_bytes=2**14)
    return HybridDeviceOptimizer(groups, split=(0, 1, 0), streaming=streaming, max_grad_norm=max_grad_norm)


OTHERS = {"nesterov": False, "momentum": 0.3, "max_grad_norm": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "muon"), [("exact", OTHERS), ("bf16-moments", {}), ("bf16-moments", OTHERS)]
)
def test_kernels_train_to_the_bits_of_operators(device, kernels, monkeypatch, states, muon):
    model, plain = (Net().to(device.torch_device) for _ in range(2))
    with hybrid(model, states=states, **muon) as ours:
        assert len(kernels) == TRIED
        trained(model, ours)
        # Each of five matrices, in each of three steps.
        assert kernels.count("before") == kernels.count("after") == TRIED // 2 + 15
        saved = ours.state_dict()["state"]
    monkeypatch.setattr(Kernels, "serve", lambda self, chunk: False)
    with hybrid(plain, states=states, **muon) as theirs:
        trained(plain, theirs)
        expected = theirs.state_dict()["state"]
    assert len(kernels) == 2 * TRIED + 30, "the trial alone"
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other), name
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


def test_kernels_have_the_bits_of_torchs_muon(device, kernels):
    model, plain = (Net().to(device.torch_device) for _ in range(2))
    with hybrid(model) as ours:
        assert len(kernels) == TRIED
        trained(model, ours)
        assert len(kernels) == TRIED + 30
        ours.synchronize()
    trained(plain, MasterMuon(plain, max_grad_norm=0.5, **MUON))
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other), name


@pytest.mark.slow
@pytest.mark.parametrize("states", ["exact", "bf16-moments"])
def test_a_step_that_is_skipped_changes_nothing(device, kernels, states):
    model = Net().to(device.torch_device)
    with hybrid(model, states=states) as optimizer:
        trained(model, optimizer)
        kept, saved = (
            {name: param.clone() for name, param in model.state_dict().items()},
            optimizer.state_dict(),
        )
        kernels.clear()
        trained(model, optimizer, steps=1, factor=float("inf"))
        assert len(kernels) == 10
        for name, param in model.state_dict().items():
            assert torch.equal(param, kept[name]), name
        torch.testing.assert_close(optimizer.state_dict()["state"], saved["state"], rtol=0, atol=0)


def test_kernels_that_round_elsewhere_are_not_used(device, kernels, monkeypatch):
    """As the interpreter does, whose own fma rounds twice."""
    if device.is_accelerator:
        pytest.skip("a GPU has one rounding")
    monkeypatch.undo()
    monkeypatch.setattr(type(device), "compiles", True)
    monkeypatch.setattr(matrix_parts, "_SHAPES", ((16, 128),))
    with hybrid(Net()) as optimizer:
        found = optimizer._engine.open.streamed._pipeline._update._matrices._kernels
        assert found._exact
        assert not any(found._exact.values())
        assert not found._served
