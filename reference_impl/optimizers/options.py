# SPDX-License-Identifier: Apache-2.0
"""The options of `HybridDeviceOptimizer` that belong together, as small frozen dataclasses.

Explained in docs/optimizer-offloading.md. This module only holds options; the code that uses one checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

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
        states: their form. Bytes a parameter are for bf16 weights, each way; an fp32 weight is its own master.

            - `exact` (10): bitwise. The upper half of a master is the weight itself, so the lower half crosses the
              link; the whole master (12) of an fp16 weight, for SGD, and on a GPU without triton.
            - `bf16-moments` (6): moments in bf16, rounded stochastically, the same way in every run. Masters are exact.
            - `compact-16` (4.06): moments in 8 bits by blocks of 64, rounded likewise. Masters are exact.
            - `compact-8` (3.06): the same, and masters of 24 bits.

            With the last two, parameters of one dimension keep exact, resident states.
        prefetch_bytes: how much may come in during an attached model's backward, into memory that this frees. Under
            FSDP2 backward frees little. There as many bytes stay on the device, beside the step's other memory.

    Raises ValueError for an unknown form.
    """

    chunk_bytes: int = STATE_CHUNK_BYTES
    states: States = "exact"
    prefetch_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse an unknown form."""
        if self.states not in STATES:
            raise ValueError(
                f"states is {self.states!r}; expected one of {', '.join(STATES)}; try {STATES[0]!r}"
            )


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
        threads: update threads; by default this rank's share of the node's cores less two. If states stream beside the
            update, enough threads to be done with them, and at least a third of the cores.
        bucket_elements: elements of one bucket, updated and copied as one.
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
