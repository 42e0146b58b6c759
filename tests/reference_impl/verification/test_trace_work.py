# SPDX-License-Identifier: Apache-2.0
"""The work that a trace counts: floating-point operations of attention and of experts, as their kernels do them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from reference_impl.verification.trace import trace
from reference_impl.verification.trace_ledger import FLOPS, TraceLedger


def test_causal_attention_counts_half_and_saves_no_scores():
    def step(is_causal):
        model = nn.Linear(64, 64)

        def loss(model, x):
            q = model(x).view(1, 128, 4, 16).transpose(1, 2)
            return functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal).sum()

        return trace(model, torch.zeros(1, 128, 64), loss)

    full, causal = step(False), step(True)
    products = 3 * 2 * 128 * 64 * 64 - 2 * 128 * 64 * 64  # the input needs no gradient
    assert full.flops - products == 2 * (causal.flops - products)
    assert full.peak_bytes < 128 * 128 * 4 * 4


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_counts_its_query_heads_without_torchs_registry(kernel, key_heads):
    # Before torch 2.12 the registry refuses fewer heads of keys than of queries; later ones agree with ours.
    query, out = (torch.empty(3, 8, 40, size, device="meta") for size in (16, 24))
    key, value = (torch.empty(3, key_heads, 56, size, device="meta") for size in (16, 24))
    named = {"query": query, "key": key, "value": value, "grad_out": out, "grad_out_": out, "out": out}
    product = 2 * 3 * 8 * 40 * 56
    for name, expected in (("", product * (16 + 24)), ("_backward", product * (3 * 16 + 2 * 24))):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{name}")
        for is_causal in (False, True):
            arguments = packet.default._schema.arguments
            args = [is_causal if a.name == "is_causal" else named.get(a.name) for a in arguments]
            assert FLOPS[packet](args, {}, None) == (expected // 2 if is_causal else expected)
        if key_heads == 8:
            backward = (out,) if name else ()
            shapes = [each.shape for each in (*backward, query, key, value)]
            counted = sdpa_backward_flop_count if name else sdpa_flop_count
            assert counted(*shapes) == expected


def test_grouped_queries_are_traced():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.product = nn.Linear(64, 96)

        def forward(self, x):
            q, k = self.product(x).view(1, 128, 6, 16).transpose(1, 2).split([4, 2], dim=1)
            return functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    step = trace(Attention(), torch.zeros(1, 128, 64), lambda model, x: model(x).sum())
    products, scores = 2 * 2 * 128 * 64 * 96, 2 * 4 * 128 * 128 * 16
    assert step.flops == products + (2 + 5) * scores // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_experts_count_each_row_once(dtype):
    """In fp32 too, which torch takes on CPU and CUDA, and refuses on meta."""
    rows = torch.empty(96, 32, device="meta", dtype=dtype)
    experts = torch.empty(4, 32, 64, device="meta", dtype=dtype)
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    with TraceLedger() as ledger:
        result = torch.ops.aten._grouped_mm(rows, experts, ends)
    assert (result.shape, result.dtype) == ((96, 64), dtype)
    assert sum(ledger.flops.values()) == 2 * 96 * 32 * 64
    if dtype == torch.bfloat16:
        assert sum(ledger.moved_bytes.values()) == experts.nbytes


def moved_bytes(operation):
    with TraceLedger() as ledger:
        operation()
    return sum(ledger.moved_bytes.values())


def test_the_gradient_of_experts_counts_their_matrices():
    rows, gradients = (torch.empty(96, size, device="meta", dtype=torch.bfloat16) for size in (32, 64))
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    found = moved_bytes(lambda: torch.ops.aten._grouped_mm(rows.t(), gradients, ends))
    assert found == 4 * 32 * 64 * 2


def test_rows_that_meet_where_an_index_says_take_longer():
    """As the gradient of experts' biases, where many rows go to one place; without a sum nothing meets."""
    values = torch.empty(4096, 512, device="meta", dtype=torch.bfloat16)
    index = torch.empty(4096, device="meta", dtype=torch.int64)

    def put(places, **options):
        target = torch.empty(places, 512, device="meta", dtype=torch.bfloat16)
        return moved_bytes(lambda: torch.ops.aten.index_put(target, [index], values, **options))

    operands = values.nbytes + index.nbytes
    assert put(4096) == operands + 2 * values.nbytes
    assert put(4096, accumulate=True) == operands + 8 * values.nbytes
    few = put(32, accumulate=True)
    assert few == operands + 6 * values.nbytes + 2 * 32 * 512 * 2 + 127 * 6_000_000
    by_two = torch.empty(8, 4, 512, device="meta", dtype=torch.bfloat16)
    found = moved_bytes(lambda: torch.ops.aten.index_put(by_two, [index, index], values, accumulate=True))
    assert found == few + index.nbytes


def test_the_backward_of_softmax_is_two_kernels():
    scores = torch.empty(8, 64, 64, device="meta")
    found = moved_bytes(lambda: torch.ops.aten._softmax_backward_data(scores, scores, -1, torch.float32))
    assert found == 6 * scores.nbytes
