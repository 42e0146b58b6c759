# SPDX-License-Identifier: Apache-2.0
"""The kernels of a measured run: they add in a fixed order, so that two runs can be compared bitwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from reference_impl.device import Device

# cuBLAS is deterministic only with a workspace of a fixed size. Torch reads this once, at the first matrix product of
# the process. It may belong to a run with kernels in no fixed order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def always_in_fixed_order(device: Device) -> bool:
    """Return whether the kernels that users get add in a fixed order: on the CPU twin they do, on CUDA not all."""
    return not device.is_accelerator


def kernels(device: Device, *, fixed_order: bool) -> AbstractContextManager[None]:
    """Return the context of a run: on CUDA deterministic kernels if `fixed_order`, on the CPU twin one thread.

    The twin keeps to one thread in any case: its kernels are small, and threads would wait for each other.
    """
    if not device.is_accelerator:
        return _one_thread()
    return _deterministic() if fixed_order else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _deterministic() -> Iterator[None]:
    was_on = torch.are_deterministic_algorithms_enabled()
    module: Any = torch.utils.deterministic
    filled = module.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling would only cost time: nothing here reads memory before it is written.
    module.fill_uninitialized_memory = False
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        module.fill_uninitialized_memory = filled
