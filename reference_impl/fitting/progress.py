# SPDX-License-Identifier: Apache-2.0
"""The progress of `fit`, on standard error: one line that changes on a terminal, elsewhere a line for each stage.

Apart because the search and its trials report their progress without knowing the reader.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

Say = Callable[[str], None]

_BACK_AND_CLEAR = "\r\x1b[2K"


def silent(text: str) -> None:
    """Say nothing."""


class Progress:
    """Takes each line of progress to where it is wanted: standard error, the caller's own function, or nowhere."""

    def __init__(self, wanted: bool | Say) -> None:
        self._stream = sys.stderr
        self._is_live = (
            wanted is True
            and self._stream is not None
            and self._stream.isatty()
            and os.environ.get("TERM") != "dumb"
        )
        if callable(wanted):
            self.say = wanted
        elif not wanted or self._stream is None:
            self.say = silent
        else:
            self.say = self._show if self._is_live else self._print

    def end(self) -> None:
        """Take the live line away."""
        if self._is_live:
            print(_BACK_AND_CLEAR, end="", file=self._stream, flush=True)

    def _print(self, text: str) -> None:
        print(f"fit: {text}", file=self._stream, flush=True)

    def _show(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        line = f"fit: {text}"[: (columns or 80) - 1]
        print(f"{_BACK_AND_CLEAR}{line}", end="", file=self._stream, flush=True)
