# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices are right, whoever computes them here: torch or `bf16_products`."""

import pytest
import torch
from torch.nn import functional

CLOSE = {"rtol": 2**-6, "atol": 2**-5}


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize(
    ("product", "shapes", "factors"),
    [
        (torch.mm, [(5, 7), (7, 3)], {}),
        (torch.addmm, [(3,), (5, 7), (7, 3)], {"beta": 0.5, "alpha": 2.0}),
        (torch.bmm, [(2, 5, 7), (2, 7, 3)], {}),
        (torch.baddbmm, [(2, 5, 3), (2, 5, 7), (2, 7, 3)], {"beta": 0.5, "alpha": 2.0}),
    ],
)
def test_a_product_is_that_of_fp64(product, shapes, factors):
    given = tensors(*shapes)
    wanted = product(*(each.double() for each in given), **factors)
    found = product(*given, **factors)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, **CLOSE)
    written = torch.zeros_like(found)
    assert product(*given, **factors, out=written) is written
    torch.testing.assert_close(written.double(), wanted, **CLOSE)


def test_gradients_of_attention_are_those_of_fp64():
    *given, ahead = tensors(*[(1, 2, 24, 8)] * 4)
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [each.detach().to(dtype).requires_grad_() for each in given]
        functional.scaled_dot_product_attention(*leaves, is_causal=True).backward(ahead.to(dtype))
        assert all(each.grad.dtype is dtype for each in leaves)
        grads.append([each.grad.double() for each in leaves])
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-4)
