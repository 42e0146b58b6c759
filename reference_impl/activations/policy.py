# SPDX-License-Identifier: Apache-2.0
"""Decides about a storage that may move: it stays, it moves, or it is computed again.

A policy decides once for each storage of a run; `engine` carries the decision out.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import enum
import weakref
from typing import Protocol

from reference_impl.activations.geometry import Extent
from reference_impl.activations.run import ForwardPass


class Decision(enum.Enum):
    """Keep a saved storage, offload it, or compute it again."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class Policy(Protocol):
    """Decides about the storages of a run, in the order in which they are saved."""

    def decide(self, run: ForwardPass, extent: Extent) -> Decision:
        """Return the decision about the storage that `run` saves next."""


class EvenFraction:
    """Offload a `fraction` of the bytes, spread evenly, and keep the last `keep_last_bytes` of a run.

    Which bytes are the last is known from the run before, so the first run keeps none.
    """

    def __init__(self, *, fraction: float = 1.0, keep_last_bytes: int = 0) -> None:
        """Raise ValueError for a fraction outside 0 to 1 or a negative number of bytes."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction}; expected 0 to 1, a share of the saved bytes; try 0.5")
        if keep_last_bytes < 0:
            raise ValueError(f"keep_last_bytes={keep_last_bytes}; expected at least 0; try 0")
        self._fraction = fraction
        self._keep_last_bytes = keep_last_bytes
        self._run: weakref.ref[ForwardPass] | None = None
        self._seen_bytes = 0
        self._offloaded_bytes = 0
        self._last_run_bytes: int | None = None

    def decide(self, run: ForwardPass, extent: Extent) -> Decision:
        """Decide by the bytes that the run has saved so far."""
        if self._run is None or self._run() is not run:
            self._start(run)
        self._seen_bytes += extent.size_bytes
        if self._last_run_bytes and self._seen_bytes > self._last_run_bytes - self._keep_last_bytes:
            return Decision.KEEP
        if self._offloaded_bytes + extent.size_bytes > self._fraction * self._seen_bytes:
            return Decision.KEEP
        self._offloaded_bytes += extent.size_bytes
        return Decision.OFFLOAD

    def _start(self, run: ForwardPass) -> None:
        self._last_run_bytes = self._seen_bytes if self._run is not None else None
        self._run = weakref.ref(run)
        self._seen_bytes = self._offloaded_bytes = 0


class Nothing:
    """Keep everything."""

    def decide(self, run: ForwardPass, extent: Extent) -> Decision:
        """Return KEEP."""
        return Decision.KEEP


class AtMost:
    """Offload as `policy` does, but keep storages above `limit_bytes`; this may be set at any time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.limit_bytes = 0

    def decide(self, run: ForwardPass, extent: Extent) -> Decision:
        """Ask the other policy about small storages alone."""
        return self._policy.decide(run, extent) if extent.size_bytes <= self.limit_bytes else Decision.KEEP
