# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices on a CPU that has no instructions for them: torch's take up to fifty times those of fp32.

Here they are computed in fp32 and rounded once, as CPUs with such instructions do. Only for speed: the tests'
assertions hold either way, and most processes started by a test have torch's own products.
"""

import warnings
from functools import partial

import torch

MADE = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")
# Compiled code brings the tensor for the result.
WRITTEN = ("mm.out", "addmm.out", "bmm.out", "baddbmm.out")


def computed_in_fp32():
    """Return an object that makes products fast as long as it is kept; None if they are fast, or torch cannot be
    told."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not hasattr(torch.library, "get_kernel"):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch says that these have kernels already.
        warnings.simplefilter("ignore", UserWarning)
        for name in MADE + WRITTEN:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            product = partial(_make if name in MADE else _write, kernel)
            library.impl(name, product, "CPU", with_keyset=True, allow_override=True)
    return library


def in_a_rank(work, device, report):
    """Do `work` with them, on a rank that `launch` has started."""
    library = computed_in_fp32()
    try:
        return work(device, report)
    finally:
        del library


def _make(kernel, keys, first, *others, **options):
    if first.dtype is not torch.bfloat16:
        return kernel.call_boxed(keys, first, *others, **options)
    options = {name: _wide(value) for name, value in options.items()}
    made = kernel.call_boxed(keys, _wide(first), *map(_wide, others), **options)
    return made.bfloat16() if isinstance(made, torch.Tensor) else tuple(each.bfloat16() for each in made)


def _write(kernel, keys, *tensors, out, **factors):
    if out.dtype is not torch.bfloat16:
        return kernel.call_boxed(keys, *tensors, out=out, **factors)
    made = kernel.call_boxed(keys, *map(_wide, tensors), out=out.float(), **factors)
    return out.resize_(made.shape).copy_(made)


def _wide(value):
    return value.float() if isinstance(value, torch.Tensor) else value
