"""Measures the link between device and host memory, each way alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.rates import best_seconds

_PROBE_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Bytes a second, device to host and host to device."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float


def measure_link(device: Device, arena: HostArena, *, probe_bytes: int = _PROBE_BYTES) -> LinkSpeed:
    """Copy `probe_bytes` (at most 128 MiB) a few times each way; the best counts. Waits for the device."""
    probe_bytes = min(probe_bytes, _PROBE_BYTES)
    block = arena.allocate(probe_bytes)
    host = block.view(torch.uint8, (probe_bytes,))
    on_device = torch.empty(probe_bytes, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    try:
        d2h_s = best_seconds(lambda: device.copy_out(host, on_device, after=()).synchronize())
        h2d_s = best_seconds(lambda: device.copy_in(on_device, host, after=()).synchronize())
    finally:
        arena.free(block)
    return LinkSpeed(d2h_bytes_per_s=probe_bytes / d2h_s, h2d_bytes_per_s=probe_bytes / h2d_s)
