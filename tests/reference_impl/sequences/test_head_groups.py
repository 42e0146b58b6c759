# SPDX-License-Identifier: Apache-2.0
"""`HeadGroups` against the same attention of all heads at once: values, computed kernels, and live tensors."""

from functools import partial

import pytest
import torch
from for_each import for_each
from grouped_attention import (
    ATTENTIONS,
    FEATURES,
    HEADS,
    HIDDEN,
    SHORT,
    TOKENS,
    Grouped,
    Holder,
    gradients,
    groups_of,
    model_of,
)

from reference_impl import HeadGroups
from reference_impl.activations.kept_results import ATTENTION, operation_of
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.sequences.divided import Division

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


@for_each([(name, groups) for name in ATTENTIONS for groups in (2, 4)])
def test_values_are_those_of_all_heads_at_once(case):
    """In fp64, whose rounding a sum over 200 positions multiplies; the output is the module's own."""
    device = Device.of("cpu")
    name, groups = case
    model = model_of(ATTENTIONS[name], device, torch.float64)
    expected = gradients(model)
    with groups_of(model, groups=groups) as attached:
        found = gradients(model)
        assert attached.modules_in_groups == 1
    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_in_bf16_groups_are_as_close_to_the_truth_as_all_heads_at_once(device):
    """Of the input's gradient and the weights' together: both round, and groups add up in fp32."""
    exact = gradients(model_of(Grouped, Device.of("cpu"), torch.bfloat16).double())
    exact = [each.to(device.torch_device) for each in exact]
    model = model_of(Grouped, device, torch.bfloat16)

    def off(found):
        return sum(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found[1:], exact[1:], strict=True)
        )

    whole = off(gradients(model))
    with groups_of(model):
        assert off(gradients(model)) < 1.1 * whole


class CountKernels(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of attention's forward kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += operation_of(func) in ATTENTION
        return func(*args, **(kwargs or {}))


def test_backward_runs_no_kernel_forward(device):
    model = model_of(Grouped, device, torch.bfloat16)
    with groups_of(model):
        gradients(model)
        with CountKernels() as counter:
            gradients(model)
    assert counter.count == 1


def test_what_is_short_or_has_no_gradient_runs_as_it_is():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    with groups_of(model) as attached:
        gradients(model, tokens=SHORT)
        with torch.no_grad():
            model(torch.zeros(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device))
        assert attached.modules_in_groups == 0


@for_each([(SHORT, 0), (SHORT + 1, 2), (2 * SHORT, 2), (2 * SHORT + 1, 4), (8 * SHORT, 4)])
def test_a_group_takes_no_more_than_all_heads_of_a_short_sequence(case):
    """By length, the next number that divides four heads of keys and values; of more than they are, as many."""
    tokens, groups = case
    model, calls = model_of(Grouped, Device.of("cpu"), torch.float64), []
    expected = gradients(model, tokens=tokens, sequences=1)
    with HeadGroups(model, ["inner"], longer_than=SHORT):
        gradients(model, tokens=tokens, sequences=1)
        model.inner.q_proj.register_forward_hook(lambda *_: calls.append(1))
        found = gradients(model, tokens=tokens, sequences=1)
    # Once in forward, and once for each group in backward.
    assert len(calls) == 1 + groups
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_weights_hook_hears_of_the_sum_once():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    heard = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda each: heard.append(each.grad.clone()))
    with groups_of(model):
        x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device)
        model(x).sum().backward()
    assert len(heard) == len(list(model.parameters()))


def test_a_gradient_of_a_gradient_is_refused():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device, requires_grad=True)
    with groups_of(model):
        output = model(x)
        with pytest.raises(RuntimeError, match=r"inner, which runs in groups of heads \(create_graph=True\)"):
            torch.autograd.grad(output.sum(), x, create_graph=True)


LAYOUTS = {
    # In the order of torch's schemas: shapes of the output and of the logsumexp of 6 heads, 2 sequences of 5 or 10.
    "aten::_scaled_dot_product_flash_attention": ((2, 6, 5, 8), (2, 6, 5)),
    "aten::_scaled_dot_product_efficient_attention": ((2, 6, 5, 8), (2, 6, 32)),
    "aten::_scaled_dot_product_cudnn_attention": ((2, 6, 5, 8), (2, 6, 5, 1)),
    "aten::_flash_attention_forward": ((2, 5, 6, 8), (2, 6, 5)),
    "aten::_efficient_attention_forward": ((2, 5, 6, 8), (2, 6, 32)),
    "flash_attn::_flash_attn_forward": ((2, 5, 6, 8), (2, 6, 5)),
    "flash_attn::_flash_attn_varlen_forward": ((10, 6, 8), (6, 10)),
    "torch_attn::_varlen_attn": ((10, 6, 8), (6, 10)),
}


@for_each(LAYOUTS)
def test_heads_are_where_kernels_have_them(operation):
    division = Division(3, (), ([], None), None)
    for number, shape in enumerate(LAYOUTS[operation]):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [division.of_kernel(operation, number, whole, group) for group in range(3)]
        dim = shape.index(6)
        assert torch.equal(torch.cat(parts, dim), whole)
        assert all(part.is_contiguous() for part in parts)
    assert division.of_kernel(operation, 2, "seed", 0) == "seed"


def test_a_groups_tensors_live_and_not_those_of_all_heads(device):
    """Of wide attention with its output kept, the peak of a layer's backward is that of a fourth of its heads."""
    torch.manual_seed(0)
    model = Holder(Grouped(heads=64, kv_heads=16)).to(device.torch_device, torch.bfloat16)
    x = torch.randn(1, 8 * TOKENS, HIDDEN, device=device.torch_device).bfloat16().requires_grad_()
    of_a_head = x.shape[1] * FEATURES * 2

    def peak():
        model(x).sum().backward()
        model.zero_grad()
        with Ledger(device, track=[x, *model.parameters()]) as ledger:
            before = ledger.device_bytes
            loss = model(x).sum()
            ledger.reset_peak()
            loss.backward()
            return (ledger.peak_device_bytes - before) / of_a_head

    whole = peak()
    with groups_of(model, groups=4):
        assert peak() < whole / 2


def test_gradients_of_two_batches_add_up(device):
    # On a GPU attention has kernels for as many heads of keys in fp32, and none in fp64.
    dtype, tolerance = (torch.float32, 1e-4) if device.is_accelerator else (torch.float64, 1e-12)
    model = model_of(partial(Grouped, kv_heads=HEADS), device, dtype)

    def accumulated():
        model.zero_grad()
        for tokens in (TOKENS, TOKENS - 1):
            x = torch.linspace(-1, 1, 2 * tokens * HIDDEN, dtype=dtype, device=device.torch_device)
            model(x.view(2, tokens, HIDDEN)).sin().sum().backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = accumulated()
    with groups_of(model):
        for ours, theirs in zip(accumulated(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@for_each(["attention", "model"])
def test_compiled_code_runs_in_groups(of):
    """Of attention itself, or of the model around it, which goes on outside its graph."""
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    expected = gradients(model)
    torch._dynamo.reset()
    called = model
    if of == "attention":
        model.inner.compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    with groups_of(model) as attached:
        found = gradients(called)
        assert attached.modules_in_groups == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
