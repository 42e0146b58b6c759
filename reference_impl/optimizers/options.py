# SPDX-License-Identifier: Apache-2.0
"""The options of `HybridDeviceOptimizer` that belong together, as small frozen dataclasses.

Explained in docs/optimizer-offloading.md. This module only holds options; the code that uses one checks it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed import ProcessGroup

from offload_arithmetic.sizes import BUCKET_ELEMENTS, STATE_CHUNK_BYTES

Profile = Mapping[str, Any] | str | Path

# From `exact` on, each rounds more than the one before.
States = Literal["exact", "bf16-moments", "compact-16", "compact-8"]
STATES: tuple[States, ...] = get_args(States)


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How the streamed share's states cross the link.

    Args:
        chunk_bytes: most bytes of states that one copy moves.
        states: their form. Bytes a parameter are those of bf16 weights, each way; an fp32 weight is its own master.

            - `exact` (10): bitwise. The upper half of a master is the weight itself, so the lower half crosses the
              link; the whole master (12) of an fp16 weight, for SGD, and on a GPU without triton.
            - `bf16-moments` (6): moments in bf16, rounded stochastically, the same way in every run. Masters are exact.
            - `compact-16` (4.06): moments in 8 bits by blocks of 64, rounded likewise. Masters are exact.
            - `compact-8` (3.06): the same, and masters of 24 bits.

            With the last two, parameters of one dimension keep exact states, which stay on the device.
        prefetch_bytes: how much may come in during an attached model's backward, into memory that this frees. Under
            FSDP2, where backward frees little, as much stays on the device, beside all that the step takes otherwise.
        hi_lo_masters, moments_dtype, compact_low_bits: the forms as earlier releases named them; each warns.

    Raises ValueError for a form that there is not.
    """

    chunk_bytes: int = STATE_CHUNK_BYTES
    states: States = "exact"
    prefetch_bytes: int = 0
    hi_lo_masters: InitVar[bool | None] = None
    moments_dtype: InitVar[torch.dtype | None] = None
    compact_low_bits: InitVar[int | None] = None

    def __post_init__(
        self,
        hi_lo_masters: bool | None,
        moments_dtype: torch.dtype | None,
        compact_low_bits: int | None,
    ) -> None:
        """Take the form from its old name, where it is given."""
        old = {
            "hi_lo_masters": hi_lo_masters,
            "moments_dtype": moments_dtype,
            "compact_low_bits": compact_low_bits,
        }
        object.__setattr__(self, "states", form_of(self.states, old, stacklevel=4))


def form_of(states: str, old: Mapping[str, Any], *, stacklevel: int) -> States:
    """Return the form of streamed states that `states` names, or earlier releases' options `old`, which warn.

    Raises ValueError for one that there is not. `stacklevel` is that of the warning, counted from here.
    """
    if unknown := old.keys() - {"hi_lo_masters", "moments_dtype", "compact_low_bits"}:
        raise TypeError(
            f"{', '.join(sorted(unknown))}: no such option; expected one of the signature's; try states="
        )
    if states not in STATES:
        raise ValueError(f"states is {states!r}; expected one of {', '.join(STATES)}; try {STATES[0]!r}")
    given = {name: value for name, value in old.items() if value is not None}
    if not given:
        return states
    moments, low_bits = given.get("moments_dtype", torch.float32), given.get("compact_low_bits")
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    if moments not in (torch.float32, torch.bfloat16) or low_bits not in (None, 8, 16):
        raise ValueError(
            f"{listed}: no such form of states; expected one of {', '.join(STATES)}; try states={STATES[0]!r}"
        )
    named: States = "exact" if moments == torch.float32 else "bf16-moments"
    if low_bits is not None:
        named = "compact-8" if low_bits == 8 else "compact-16"
        if moments != torch.float32 or given.get("hi_lo_masters"):
            raise ValueError(f"{listed}: two forms of states; expected one; try states={named!r}")
    warnings.warn(
        f"{listed} will not be taken in the next release; use states={named!r}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return named


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The memory that `split="auto"` may use for states, and the rates it reckons with.

    Args:
        device_bytes: device memory; by default the need of the streamed share's slots.
        host_bytes: host memory of this rank; by default 95 % of the available memory, shared by the ranks of the host.
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
    forms: dict[str, Any] = {
        name: keywords.pop(name) for name in ("hi_lo_masters", "moments_dtype") if name in keywords
    }
    if forms:
        changes["streaming"]["states"] = form_of(options.streaming.states, forms, stacklevel=4)
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
