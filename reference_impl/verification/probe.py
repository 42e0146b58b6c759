# SPDX-License-Identifier: Apache-2.0
"""Measures this machine in at most 20 seconds, so that plans rest on its own rates.

The document is described by `schema/profile.schema.json`; within one major `schema_version` fields are only added.
It measures one process on an idle machine; ranks that share a host share its DRAM and cores too.

Explained in docs/choosing.md.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload_arithmetic.sizes import BUCKET_ELEMENTS
from offload_arithmetic.update_time import Split
from reference_impl.device import Device
from reference_impl.memory import rates
from reference_impl.memory.host import available_bytes
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.rates import best_seconds
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.cpu.rate import cpu_update_rates
from reference_impl.optimizers.cpu.workers import cpu_budget
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss
from reference_impl.verification.steps import Progress, unseen
from reference_impl.verification.trace import trace

SCHEMA_VERSION = "1.0"
_TENSOR_ELEMENTS = 2**20
_TRIES = 2
# So narrow that its kernels are over before the next one is launched.
_NARROW = DecoderShape(hidden=64, ffn=128, layers=16, heads=4, vocab=256)
_NARROW_STEPS = 25


@dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """How much each measurement moves: large against its start, small against 20 seconds."""

    copy_bytes: int
    triad_bytes: int
    pin_bytes: int
    most_pinned_bytes: int
    disk_bytes: int
    matmul_size: int
    parameters: int


ACCELERATOR = ProbeSizes(
    copy_bytes=2**29,
    triad_bytes=2**28,
    pin_bytes=2**30,
    most_pinned_bytes=2**33,
    disk_bytes=2**28,
    matmul_size=8192,
    parameters=2**28,
)
TWIN = ProbeSizes(
    copy_bytes=2**26,
    triad_bytes=2**25,
    pin_bytes=2**26,
    most_pinned_bytes=2**28,
    disk_bytes=2**25,
    matmul_size=512,
    parameters=2**24,
)


def probe(device: Device, *, folder: str | Path | None = None, progress: Progress = unseen) -> dict[str, Any]:
    """Measure and return the profile; the disk is that of `folder`, by default of temporary files.

    Raises DiskError for a folder that cannot be written, HostMemoryError on a host without some GiB to spare.
    """
    sizes = ACCELERATOR if device.is_accelerator else TWIN
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "copies": lambda: _copies(device, sizes),
        "memory and matrix products": lambda: _memory(device, sizes),
        "launches of kernels": lambda: {"launch_us": launch_s(device) * 1e6},
        "updates on the CPU": lambda: _cpu_updates(device, sizes),
        "updates with their copies": lambda: _whole_updates(device, sizes),
        "disk": lambda: _disk(folder or tempfile.gettempdir(), sizes),
    }
    began = time.perf_counter()
    found = _machine(device)
    for done, (name, measure) in enumerate(parts.items()):
        progress(name, done, len(parts))
        found |= measure()
    return {
        "schema_version": SCHEMA_VERSION,
        "errors": [],
        "hardware": found,
        "sizes": asdict(sizes),
        "probe_s": time.perf_counter() - began,
    }


def _copies(device: Device, sizes: ProbeSizes) -> dict[str, Any]:
    copies = rates.copy_rates(device, sizes.copy_bytes)
    return {
        "d2h_pinned_GBs": copies.d2h / 1e9,
        "h2d_pinned_GBs": copies.h2d / 1e9,
        "duplex_total_GBs": copies.duplex / 1e9,
        **_staged(device, sizes),
        "pin_GBs": rates.pin_rate(device, sizes.pin_bytes) / 1e9,
        **_pinned_limit(device, sizes),
    }


def _staged(device: Device, sizes: ProbeSizes) -> dict[str, float]:
    """Return how fast pageable memory is copied, unless others of this process have pinned memory or limited it."""
    if pinned_book.pinned_bytes or pinned_book.limit_bytes is not None:
        return {}
    return {"staged_GBs": rates.staged_rate(device, sizes.copy_bytes) / 1e9}


def _pinned_limit(device: Device, sizes: ProbeSizes) -> dict[str, int]:
    """Return the machine's limit of pinned bytes, if it is within the tried sizes."""
    found = rates.most_pinned_bytes(device, min(sizes.most_pinned_bytes, available_bytes() // 4))
    return {} if found is None else {"pinned_memory_bytes": max(found, 1)}


def _memory(device: Device, sizes: ProbeSizes) -> dict[str, Any]:
    return {
        "host_triad_GBs": rates.triad_rate(sizes.triad_bytes) / 1e9,
        "hbm_GBs": rates.device_copy_rate(device, sizes.copy_bytes) / 1e9,
        "bf16_matmul_TFLOPs": rates.matmul_rate(device, sizes.matmul_size) / 1e12,
    }


def launch_s(device: Device) -> float:
    """Return the seconds that the host takes to launch a kernel of an eager forward and backward, the median of steps.

    Kernels are counted as in a trace, so that a step of a traced model takes at least as many times this.
    """
    model = Decoder(_NARROW).to(device.torch_device, torch.bfloat16)
    ids = torch.zeros(1, 64, dtype=torch.int64, device=device.torch_device)

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return decoder_loss(model(ids), ids)

    def step() -> float:
        start = time.perf_counter()
        loss_of(model, ids).backward()
        device.synchronize()
        return time.perf_counter() - start

    step()
    return statistics.median(step() for _ in range(_NARROW_STEPS)) / trace(model, ids, loss_of).kernels


def _cpu_updates(device: Device, sizes: ProbeSizes) -> dict[str, Any]:
    by_threads = cpu_update_rates(device, sizes.parameters, _thread_counts())
    return {
        "cpu_adam_fused_Gparam_s": max(by_threads.values()) / 1e9,
        "cpu_adam_by_threads": [
            {"threads": threads, "Gparam_s": rate / 1e9} for threads, rate in by_threads.items()
        ],
        "cpu_adam_perparam_fused_Gparam_s": torch_cpu_rate(sizes.parameters) / 1e9,
    }


def _whole_updates(device: Device, sizes: ProbeSizes) -> dict[str, Any]:
    cpu = split_rate(device, sizes.parameters, Split(0, 0, 1))
    streamed = split_rate(device, sizes.parameters, Split(0, 1, 0))
    # So split, both would end at once if they did not share the link and the host's memory.
    cpu_share = cpu / (cpu + streamed)
    both = split_rate(device, sizes.parameters, Split(0, 1 - cpu_share, cpu_share))
    return {
        "cpu_with_copies_Gparam_s": cpu / 1e9,
        "streamed_Gparam_s": streamed / 1e9,
        "both_Gparam_s": both / 1e9,
        "both_cpu_share": cpu_share,
    }


def _disk(folder: str | Path, sizes: ProbeSizes) -> dict[str, Any]:
    written, read = rates.disk_rates(folder, sizes.disk_bytes)
    return {"disk_write_GBs": written / 1e9, "disk_read_GBs": read / 1e9}


def _machine(device: Device) -> dict[str, Any]:
    memory_bytes = available_bytes() if device.allocator is None else device.allocator.total_bytes
    return {
        "gpu": device.name,
        "gpus_per_node": device.count(),
        "gpu_memory_bytes": memory_bytes,
        "host_memory_bytes": available_bytes(),
        "cpus": len(os.sched_getaffinity(0)),
        "host": platform.node(),
        "driver": _driver(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str:
    """Return the release of NVIDIA's driver as the kernel module says it, or nothing without one."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", said)
    return found.group() if found else ""


def _thread_counts() -> list[int]:
    """Powers of two up to all cores, all cores, and the number that the optimizer takes by itself."""
    cores = len(os.sched_getaffinity(0))
    return sorted({2**power for power in range(cores.bit_length())} | {cores, cpu_budget()})


def torch_cpu_rate(numel: int) -> float:
    """Return parameters/s of `torch.optim.AdamW(fused=True)` on the CPU over fp32 tensors, one call each."""
    params = [nn.Parameter(torch.zeros(_TENSOR_ELEMENTS)) for _ in range(max(numel // _TENSOR_ELEMENTS, 1))]
    optimizers = [torch.optim.AdamW([param], fused=True) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)

    def run() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return len(params) * _TENSOR_ELEMENTS / best_seconds(run, tries=_TRIES)


class _Weights(nn.Module):
    """`numel` bf16 parameters with gradients, in equal tensors."""

    def __init__(self, device: Device, numel: int) -> None:
        super().__init__()
        count = max(numel // BUCKET_ELEMENTS, 1)
        size = (numel // count,)
        self.weights = nn.ParameterList(
            torch.zeros(size, dtype=torch.bfloat16, device=device.torch_device) for _ in range(count)
        )
        self.numel = count * size[0]

    def make_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)


def split_rate(device: Device, numel: int, split: Split) -> float:
    """Return parameters/s of `HybridDeviceOptimizer`'s whole step at `split`, copies included."""
    weights = _Weights(device, numel)
    with HybridDeviceOptimizer(weights.parameters(), split=split) as optimizer:

        def run() -> None:
            weights.make_gradients()
            optimizer.step()
            device.synchronize()

        return weights.numel / best_seconds(run, tries=_TRIES)
