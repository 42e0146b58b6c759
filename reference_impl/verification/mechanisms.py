"""What a row of `verify` is: how a mechanism is attached, what it promises, and what it should free.

A prediction is a formula over the model alone. It does not ask the mechanism what it has done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference_impl.verification.train import Attach
from reference_impl.verification.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of one verification: activation storages below `min_bytes` stay, states travel by `chunk_bytes`."""

    workload: Workload
    min_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A run without offload, which rows are compared with."""

    name: str
    workload: Workload
    max_grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One row; the device's peak should fall by `freed_bytes`, which `formula` says in words.

    `same_kernels`: every number is computed by the kernels of the run without offload, so the result is bitwise
    the same on every device.
    """

    name: str
    reference: Reference
    attach: Attach
    freed_bytes: int
    formula: str
    same_kernels: bool


# Asks for the peak of a reference, which is known when a row is attached.
PeakOf = Callable[[Reference], int]
