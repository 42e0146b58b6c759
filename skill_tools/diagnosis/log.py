"""The text of a training log with its line numbers, read from a file or standard input; its size is bounded."""

import sys
from dataclasses import dataclass

from skill_tools.configs.files import read_bytes
from skill_tools.errors import UnusableInput

MAX_BYTES = 3 << 20
_HEAD_BYTES = 1 << 20
_LARGEST_BYTES = 4 << 30
_MOST_PIPED_BYTES = 512 << 20  # a pipe may have no end


@dataclass(frozen=True, slots=True)
class Log:
    """The text of a log; `skipped_lines` between its first MiB and its end were left out."""

    name: str
    text: str
    skipped_after: int
    skipped_lines: int

    def line_at(self, position: int) -> int:
        """Return the line number, from 1, of a position in `text`."""
        line = self.text.count("\n", 0, position) + 1
        return line + self.skipped_lines if position >= self.skipped_after else line

    def context(self, position: int) -> str:
        """Return the whole line around `position`, without surrounding blanks."""
        start = self.text.rfind("\n", 0, position) + 1
        end = self.text.find("\n", position)
        return self.text[start : end if end >= 0 else len(self.text)].strip()


def read_log(path: str) -> Log:
    """Read `path` (`-` is standard input); of a log above 3 MiB, its first MiB and its end."""
    if path == "-":
        data = sys.stdin.buffer.read(_MOST_PIPED_BYTES + 1)
        if len(data) > _MOST_PIPED_BYTES:
            raise UnusableInput(
                f"standard input holds more than {_MOST_PIPED_BYTES >> 20} MiB",
                expected="a training log or traceback",
                attempt="tail -c 100M train.log | offload diagnose -",
            )
    else:
        expected, attempt = "a training log or traceback", "its path, or - for standard input"
        data = read_bytes(path, _LARGEST_BYTES, expected=expected, attempt=attempt)
    name = "<stdin>" if path == "-" else path
    if not data.strip():
        raise UnusableInput(
            f"{name} is empty", expected="a training log or traceback", attempt="the log of a rank"
        )
    # A crashed host leaves some NUL bytes in a log, not one in a hundred.
    if data.count(0) > len(data) // 100:
        raise UnusableInput(
            f"{name} is no text", expected="a training log or traceback", attempt="the log of a rank"
        )
    if len(data) <= MAX_BYTES:
        return Log(name, data.decode("utf-8", "replace"), len(data), 0)
    head, middle, tail = data[:_HEAD_BYTES], data[_HEAD_BYTES:-MAX_BYTES], data[-MAX_BYTES:]
    text = head.decode("utf-8", "replace")
    return Log(name, text + tail.decode("utf-8", "replace"), len(text), middle.count(b"\n"))
