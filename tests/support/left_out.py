# SPDX-License-Identifier: Apache-2.0
"""Counts matrix products, and has backward of tiles and groups compute those that it leaves out."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.sequences import unneeded_products

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_left_out(computes_all=True):
    """Have backward compute everything, or as much as where nothing was ever compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unneeded_products, "_has_compiled", lambda: computes_all)
        yield
