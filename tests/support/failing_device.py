# SPDX-License-Identifier: Apache-2.0
"""Makes one chosen call fail, wherever mechanisms meet the device, host memory or the disk.

`FailAt(monkeypatch, seam)` counts the calls of a seam; `at(n, error)` makes the n-th from then on raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.device import CpuTwin
from reference_impl.memory.arena import HostArena

SEAMS: dict[str, tuple[Any, str]] = {
    "copy out": (CpuTwin, "copy_out"),
    "copy in": (CpuTwin, "copy_in"),
    "event": (CpuTwin, "record"),
    "wait": (CpuTwin, "wait"),
    "pinning": (CpuTwin, "pin"),
    "host block": (HostArena, "allocate"),
    "disk write": (os, "pwrite"),
    "disk read": (os, "preadv"),
}


class FailAt:
    """A seam's calls, of which one fails: before it does anything, or after it has done it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seam: str, *, after: bool = False) -> None:
        owner, name = SEAMS[seam]
        real: Callable[..., Any] = getattr(owner, name)
        self.calls = 0
        self._fail_at = 0
        self._error: BaseException | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self._error is not None and self.calls == self._fail_at
            if fails and not after:
                raise self._take_error()
            result = real(*args, **kwargs)
            if fails:
                raise self._take_error()
            return result

        monkeypatch.setattr(owner, name, call)

    @property
    def has_failed(self) -> bool:
        """Whether the error that was asked for has been raised."""
        return self._error is None

    def at(self, number: int, error: BaseException) -> None:
        """Make call `number` from here on raise `error`."""
        self.calls, self._fail_at, self._error = 0, number, error

    def never(self) -> None:
        """Make no call fail."""
        self._error = None

    def _take_error(self) -> BaseException:
        error, self._error = self._error, None
        assert error is not None
        return error
