# SPDX-License-Identifier: Apache-2.0
"""Line and column of places in a text, for readers that move on through it.

Apart because the readers of JSON and of TOML, which do not know each other, count alike.
"""


class Position:
    """Counts the lines of `text` up to places that are asked for in order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line, self._line_start, self._counted = 1, 0, 0

    def of(self, at: int) -> tuple[int, int]:
        """Return line and column of the character at `at`, from 1; `at` is never less than before."""
        breaks = self._text.count("\n", self._counted, at)
        if breaks:
            self._line += breaks
            self._line_start = self._text.rfind("\n", self._counted, at) + 1
        self._counted = at
        return self._line, at - self._line_start + 1
