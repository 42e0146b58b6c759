# SPDX-License-Identifier: Apache-2.0
"""The formulas of elements as parts of a GPU's kernels: each makes the bits of its source in `algorithms`.

Imported where a kernel runs, because triton comes with torch's builds for GPUs only. A kernel that has one of them is
launched without fused products and sums; quotients and roots follow IEEE 754.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam(master, gradient, average, square, numbers_ptr):
    """`adam_formula`, and the root that it takes: compact states make the code of `square` of it."""
    sign, l2, kept = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    beta1, rest1 = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    beta2, rest2 = tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6)
    eps, step_size, scale = tl.load(numbers_ptr + 7), tl.load(numbers_ptr + 8), tl.load(numbers_ptr + 9)
    gradient = sign * gradient + l2 * master
    average = beta1 * average + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    root = tl.sqrt_rn(square)
    master = kept * master - tl.div_rn(step_size * average, scale * root + eps)
    return master, average, square, root


@triton.jit
def sgd(master, gradient, average, numbers_ptr):
    """`sgd_formula`."""
    sign, l2, momentum = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    lr, nesterov = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    gradient = sign * gradient + l2 * master
    new = momentum * average + gradient
    direction = tl.where(nesterov != 0, gradient + momentum * new, new)
    return master - lr * direction, tl.where(momentum != 0, new, average)
