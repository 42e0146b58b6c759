# SPDX-License-Identifier: Apache-2.0
"""One line of a plan's two accounts, memory and time, each with its formula."""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of a line's bytes. Sums and figures go by it, never by the printed name."""

    WEIGHTS = "weights"
    FROZEN_WEIGHTS = "frozen weights"
    IDLE_WEIGHTS = "idle weights"  # a vision tower without images, and the allocator's rounding of weights
    VISITING_WEIGHTS = "visiting weights"  # on the GPU only during their use: gathered, or in a window
    GRADIENTS = "gradients"  # of the trained weights: they stay until the step
    OTHER_GRADIENTS = "other gradients"  # on their way, reduced, summed or copied
    MASTERS = "masters"
    MOMENTS = "moments"
    CPU_STATES = "states updated on the CPU"  # whose staging is pinned
    PAGEABLE_STATES = "pageable states"  # updated on the CPU, without staging of their own
    OTHER_STATES = "other states"  # masters and moments together: streamed, restored, of adapters
    PINNED_ROUNDING = "rounding of pinned blocks"
    ACTIVATIONS = "activations"
    LAYER_WORK = "layer work"  # of one layer at once
    LOSS = "loss"
    WORKSPACE = "workspace"  # of cuBLAS
    RESERVE = "reserve"  # the process's own, outside the allocator


class Line(NamedTuple):
    """A line of the memory account: `bytes` of a kind under a printed name, by a formula in words.

    `when` is its lifetime: `always`; from step to the end of forward (`between`), or until backward has reached a layer
    (`until backward`); `forward`; `step`, from forward to the end of backward; `loss`, at the start of backward, and
    then `head`; `recompute`, while a layer is recomputed; `last block`, `first block` and `embedding`, in their
    backward; `leaving`, from the last layer's backward to the step; `backward`, complete at its end; `update`, while
    the optimizer steps; `reserve`, outside of the allocator. `model.memory` lists those of each moment.
    """

    kind: Kind
    name: str
    bytes: int
    formula: str
    when: str = "always"


class Cost(NamedTuple):
    """A line of the time account: a mode's additional `work_s`; its `exposed_s` lengthen the step."""

    name: str
    work_s: float
    exposed_s: float
    formula: str


def each(bytes_each: float, count: int, what: str) -> str:
    """Write `4 B x 1,000 parameters`."""
    return f"{bytes_each:g} B x {count:,} {what}"
