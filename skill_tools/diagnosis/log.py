# SPDX-License-Identifier: Apache-2.0
"""The text of a training log with its line numbers, read from a file or standard input; its size is bounded.

Of a long log three parts are kept: its beginning, the first place in the middle where something failed, and its end.
"""

import codecs
import io
import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import IO, NamedTuple

from skill_tools.configs.files import open_file
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_CHUNK_BYTES = 1 << 20
_CHUNKS_AT_THE_END = 2
_CHUNKS_OF_A_FAILURE = 2  # a traceback may go on in the next one
_SEAM_BYTES = 64  # of the chunk before, in which a sign of failure may begin
_MOST_PIPED_BYTES = 512 << 20  # a pipe may have no end
_FAILED = (b"Traceback (most recent call last)", b"ut of memory", b"oom-kill", b"oom_kill", b"core dumped")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]")
_EXPECTED = "a training log or traceback"
_SAMPLE_BYTES = 1 << 16
# Of Chinese, Japanese and Korean systems: a letter takes two high bytes, which Western text seldom has in a row.
_OLDER = ("gb2312", "euc_jp", "euc_kr")


class Log(NamedTuple):
    """The text of a log, without colours; `cuts` are positions in it with the lines that were left out before each."""

    name: str
    text: str
    cuts: tuple[tuple[int, int], ...] = ()

    def line_at(self, position: int) -> int:
        """Return the line number, from 1, of a position in `text`."""
        left_out = sum(lines for start, lines in self.cuts if position >= start)
        return self.text.count("\n", 0, position) + 1 + left_out

    def context(self, position: int) -> str:
        """Return the whole line around `position`, without surrounding blanks; a progress bar before it is left out."""
        start = max(self.text.rfind("\n", 0, position), self.text.rfind("\r", 0, position)) + 1
        end = self.text.find("\n", position)
        line = self.text[start : end if end >= 0 else len(self.text)]
        return line.partition("\r")[0].strip() or line.strip()


def read_log(path: str) -> Log:
    """Read `path` (`-` is standard input); raises `UnusableInput` where it is empty or no text."""
    if path == "-":
        name, chunks = "<stdin>", _kept(_piped(sys.stdin.buffer))
    else:
        name = path
        with open_file(path, expected=_EXPECTED, attempt="its path, or - for standard input") as file:
            chunks = _kept(_chunks(file))
    data = b"".join(chunk for chunk, _ in chunks)
    if not data.strip():
        raise UnusableInput(f"{name} is empty", expected=_EXPECTED, attempt="the log of a rank")
    encoding = _encoding(data)
    # A crashed host leaves some NUL bytes in a log, not one in a hundred.
    if encoding == "utf-8" and data.count(0) > len(data) // 100:
        raise UnusableInput(f"{name} is no text", expected=_EXPECTED, attempt="the log of a rank")
    return _joined(name, chunks, codecs.getincrementaldecoder(encoding)("replace"))


def _encoding(data: bytes) -> str:
    """Return the encoding of a log's beginning: UTF-8, or the first of the older ones that it is valid in."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = data[:_SAMPLE_BYTES]
    for encoding in ("utf-8", *_OLDER):
        try:
            codecs.getincrementaldecoder(encoding)("strict").decode(sample)
        except UnicodeDecodeError:
            continue
        return encoding
    return "utf-8"


def _joined(name: str, chunks: list[tuple[bytes, int]], decoder: codecs.IncrementalDecoder) -> Log:
    text, cuts, length = io.StringIO(), [], 0
    for chunk, left_out in chunks:
        if left_out:
            cuts.append((length, left_out))
        plain = _COLOURS.sub("", decoder.decode(chunk)).replace("\r\n", "\n")
        text.write(plain)
        length += len(plain)
    text.write(decoder.decode(b"", final=True))
    return Log(name, text.getvalue(), tuple(cuts))


def _kept(chunks: Iterator[bytes]) -> list[tuple[bytes, int]]:
    """Return the chunks of the log, each with the number of lines left out before it."""
    kept: list[tuple[bytes, int]] = []
    end: deque[bytes] = deque()
    left_out, of_a_failure, seam = 0, 0, b""
    for chunk in chunks:
        end.append(chunk)
        if len(end) <= _CHUNKS_AT_THE_END:
            continue
        oldest = end.popleft()
        fails = of_a_failure == 0 and bool(kept) and any(each in seam + oldest for each in _FAILED)
        seam = oldest[-_SEAM_BYTES:]
        if not kept or fails or 0 < of_a_failure < _CHUNKS_OF_A_FAILURE:
            of_a_failure += bool(kept)
            kept.append((oldest, left_out))
            left_out = 0
        else:
            left_out += oldest.count(b"\n")
    for chunk in end:
        kept.append((chunk, left_out))
        left_out = 0
    return kept


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _piped(file: IO[bytes]) -> Iterator[bytes]:
    read = 0
    for chunk in _chunks(file):
        read += len(chunk)
        if read > _MOST_PIPED_BYTES:
            raise UnusableInput(
                f"standard input holds more than {_MOST_PIPED_BYTES >> 20} MiB",
                expected=_EXPECTED,
                attempt=f"tail -c 100M train.log | {COMMAND} diagnose -",
            )
        yield chunk
