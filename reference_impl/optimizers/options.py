"""The options of `HybridDeviceOptimizer` that belong together, as small frozen dataclasses.

Explained in docs/optimizer-offloading.md. This module only holds options; the code that uses one checks it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from offload_arithmetic.sizes import BUCKET_ELEMENTS, STATE_CHUNK_BYTES
from offload_arithmetic.states import Form, form

Profile = Mapping[str, Any] | str | Path


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How the streamed share's states cross the link.

    Args:
        chunk_bytes: most bytes of states that one copy moves.
        hi_lo_masters: stream only the lower half of a bf16 parameter's master; the weight is the upper half. Exact.
        moments_dtype: `torch.bfloat16` halves the moments' bytes. Not bitwise: moments are rounded stochastically, the
            same way in every run.
        compact_low_bits: instead of both, compact states: moments in 8 bits by blocks of 64, and so many low bits of a
            bf16 parameter's master, 16 (exact masters) or 8 (masters of 24 bits). Not bitwise: what is cut off is
            rounded stochastically, the same way in every run. Parameters of one dimension keep exact states, which stay
            on the device.
        prefetch_bytes: how much may come in during an attached model's backward, into memory that this frees. Under
            FSDP2, where backward frees little, as much stays on the device, beside all that the step takes otherwise.
    """

    chunk_bytes: int = STATE_CHUNK_BYTES
    hi_lo_masters: bool = False
    moments_dtype: torch.dtype = torch.float32
    compact_low_bits: int | None = None
    prefetch_bytes: int = 0

    @property
    def form(self) -> Form:
        """The bytes of a streamed element."""
        return form(
            hi_lo_masters=self.hi_lo_masters,
            moment_bytes=self.moments_dtype.itemsize,
            compact_low_bits=self.compact_low_bits,
        )


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What `split="auto"` may use for states, and the rates it reckons with.

    Args:
        device_bytes: device memory; by default what the slots of the streamed share need.
        host_bytes: host memory of this rank; by default 95 % of what is available, shared by the ranks of the host.
        profile: this machine's rates, as `reference_impl.probe` returns them or a file of them; by default a probe of
            at most 3 s.
        ranks: the process group of DistributedDataParallel, whose ranks have to take one split, and probe at once;
            each of them constructs the optimizer then. DTensors say it themselves.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    profile: Profile | None = None
    ranks: ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class CpuUpdate:
    """How the CPU share is updated.

    Args:
        threads: update threads; by default this rank's share of the node's cores less two, or where states stream
            beside the update, as many as are done when those are, and a third of the cores at least.
        bucket_elements: elements of one bucket, which is updated and copied as one.
        pinned: pin the staging buffers, through which gradients come and new weights go.
        overlap_forward: False means that `step()` returns finished, whether or not a model is attached.
    """

    threads: int | None = None
    bucket_elements: int = BUCKET_ELEMENTS
    pinned: bool = True
    overlap_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class Options:
    """All of them, as one optimizer uses them."""

    streaming: Streaming = Streaming()
    budgets: Budgets = Budgets()
    cpu: CpuUpdate = CpuUpdate()


# Keywords of releases before options were grouped → (group, field).
_MOVED = {
    "chunk_bytes": ("streaming", "chunk_bytes"),
    "hi_lo_masters": ("streaming", "hi_lo_masters"),
    "moments_dtype": ("streaming", "moments_dtype"),
    "prefetch_bytes": ("streaming", "prefetch_bytes"),
    "device_budget_bytes": ("budgets", "device_bytes"),
    "host_budget_bytes": ("budgets", "host_bytes"),
    "profile": ("budgets", "profile"),
    "cpu_threads": ("cpu", "threads"),
    "bucket_elements": ("cpu", "bucket_elements"),
    "pin_cpu_grads": ("cpu", "pinned"),
    "pin_cpu_params": ("cpu", "pinned"),
    "overlap_cpu_optimizer_d2h_h2d": ("cpu", "overlap_forward"),
}


def take_moved_keywords(options: Options, keywords: dict[str, Any]) -> Options:
    """Take old option keywords out of `keywords` and return `options` with their values; each one warns.

    The warning points at the caller's caller.
    """
    changes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for old in [name for name in keywords if name in _MOVED]:
        group, field = _MOVED[old]
        value = keywords.pop(old)
        kind = type(getattr(options, group)).__name__
        warnings.warn(
            f"{old} has become a field and will be removed as a keyword in the next release; use "
            f"{group}={kind}({field}={value!r})",
            DeprecationWarning,
            stacklevel=3,
        )
        # Where two old names meet in one field, it is true only if both are.
        changes[group][field] = changes[group].get(field, True) and value
    return replace(options, **{name: replace(getattr(options, name), **new) for name, new in changes.items()})
