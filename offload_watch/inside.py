# SPDX-License-Identifier: Apache-2.0
"""`watch()`: the same observation from inside a program or a notebook, with a given place for its lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from offload_watch import report
from offload_watch.observer import Observer


class Watch:
    """Watches this process until `close()`; a context manager. `seen` is the newest sample, as plain data."""

    def __init__(self, plan: Mapping[str, Any] | None, every_s: float, say: Callable[[str], None]) -> None:
        self._plan, self._every_s, self._say = plan, every_s, say
        self._next_s = time.monotonic() + every_s
        self._is_closed = False
        self.seen: Mapping[str, Any] = {}
        self._observer = Observer(Path(), self._take)
        self._observer.start()

    def _take(self, seen: Mapping[str, Any]) -> None:
        self.seen = seen
        if seen["now"] and time.monotonic() >= self._next_s and not self._is_closed:
            self._next_s = time.monotonic() + self._every_s
            self._say(report.live(seen, report.planned(self._plan or seen["plan"])))

    def close(self) -> None:
        """Take all hooks away, and say the last line. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._observer.stop()
        if self.seen["steps"]:
            self._say(report.last(self.seen, report.planned(self._plan or self.seen["plan"])))

    def __enter__(self) -> Self:
        """Return the watch, which has begun already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it, whatever the program has raised."""
        self.close()


def watch(
    plan: Mapping[str, Any] | None = None, *, every_s: float = 10, say: Callable[[str], None] | None = None
) -> Watch:
    """Say every `every_s` seconds, and at the end, whose the bytes on device and host are.

    >>> with watch():
    ...     train()

    Args:
        plan: a planner's document to compare with; None takes the one that `apply_plan` or `fit` has put in force.
        every_s: seconds between two lines.
        say: takes each line; None prints it on standard error.

    Raises:
        ValueError: a plan without predictions, or seconds not above 0.
    """
    if plan is not None and report.planned(plan) is None:
        raise ValueError(
            "the plan predicts nothing; expected a document with a recommendation; try offload plan --format json"
        )
    if not every_s > 0:
        raise ValueError(f"every_s={every_s}; expected more than 0; try 10")
    return Watch(plan, every_s, say or _print)


def _print(line: str) -> None:
    print(f"watch: {line}", file=sys.stderr, flush=True)
