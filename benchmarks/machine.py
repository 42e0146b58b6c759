# SPDX-License-Identifier: Apache-2.0
"""Describes the machine of a benchmark: device, versions, and the bandwidths that its numbers depend on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import torch

from reference_impl.device import Device


def machine(device: Device, *, begin: Callable[[], object] = lambda: None) -> dict[str, object]:
    """Return names, versions and, on CUDA, pinned copy bandwidths in GB/s.

    Each measurement calls `begin` first: there ranks of one host wait for each other.
    """
    facts: dict[str, object] = {
        "device": device.name,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return facts | (copy_bandwidths(device, begin) if device.is_accelerator else {})


def copy_bandwidths(device: Device, begin: Callable[[], object]) -> dict[str, float]:
    """Return D2H, H2D and both at once, in GB/s, from pinned memory: of copies of a fifth of a second."""
    size_bytes, times = 2**28, 32
    gpu = [torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def rate(*, out: bool, back: bool) -> float:
        device.synchronize()
        begin()
        start = time.perf_counter()
        for _ in range(times):
            now = device.record()
            if out:
                device.copy_out(host[0], gpu[0], after=[now])
            if back:
                device.copy_in(gpu[1], host[1], after=[now])
        device.synchronize()
        return times * size_bytes * (out + back) / (time.perf_counter() - start) / 1e9

    rate(out=True, back=True)
    return {
        "d2h_gb_per_s": round(rate(out=True, back=False), 1),
        "h2d_gb_per_s": round(rate(out=False, back=True), 1),
        "duplex_gb_per_s": round(rate(out=True, back=True), 1),
    }


def print_table(rows: list[dict[str, object]]) -> None:
    """Print rows as a Markdown table, columns in the order of the first row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
