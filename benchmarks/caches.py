# SPDX-License-Identifier: Apache-2.0
"""Gives memory back between the rows of a benchmark, so that none is measured with the caches of another."""

from __future__ import annotations

import gc

import torch

from reference_impl.device import Device


def forget_caches(device: Device) -> None:
    """Give back the memory that the row before has left in torch's caches, pinned memory among it."""
    gc.collect()
    if device.is_accelerator:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
