# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of several runs for one progress report."""

from __future__ import annotations

from collections.abc import Callable

# Called after every step with the run's name, the steps done and the steps of all runs.
Progress = Callable[[str, int, int], None]


def unseen(name: str, done: int, total: int) -> None:
    """Report to nobody."""


class Steps:
    """The steps of all runs, `total` of them."""

    def __init__(self, progress: Progress, *, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def begin(self, name: str) -> None:
        """Report that `name` has begun: the first step of a run may be a minute away."""
        self._progress(name, self._done, self._total)

    def of(self, name: str) -> Callable[[], None]:
        """Return the function to call after each step of the run `name`."""

        def on_step() -> None:
            self._done += 1
            self._progress(name, self._done, self._total)

        return on_step
