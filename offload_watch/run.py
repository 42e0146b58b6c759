# SPDX-License-Identifier: Apache-2.0
"""Runs a program under watch: starts it as it is, shows the output of its processes, and ends as it ends.

The program has the terminal, its own standard streams, and its signals: Ctrl-C reaches it as without us, and a signal
that somebody sends to us is handed on. On a terminal the last row is ours; elsewhere a line appears now and then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from offload_watch import report

_INJECTED = Path(__file__).resolve().parent / "injected"
_HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_LIVE_EVERY_S = 0.5


def watch(command: Sequence[str], plan: Mapping[str, Any] | None, *, every_s: float, stream: TextIO) -> int:
    """Run `command` to its end and return its exit code, 128 and the signal's number where one ended it.

    The samples go to `stream`: on a terminal the last row shows them live, elsewhere a line every `every_s` seconds.

    Raises:
        OSError: the command cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="offload-watch-"))
    watched = {*_HANDED_ON, signal.SIGCHLD, signal.SIGWINCH}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    row: _Row | None = None
    try:
        path = os.pathsep.join(filter(None, (str(_INJECTED), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "OFFLOAD_WATCH": str(folder)},
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        row = _Row(stream) if _is_live(stream) else None
        _wait(process, watched, folder, plan, row, every_s, stream)
        if row is not None:
            row.close()
        for line in last_lines(folder, plan):
            print(f"offload watch: {line}", file=stream, flush=True)
    finally:
        if row is not None:
            row.close()
        shutil.rmtree(folder, ignore_errors=True)
        # A Ctrl-C that the program has had already is none of ours.
        while signal.sigtimedwait(watched, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = process.returncode
    return code if code >= 0 else 128 - code


def _wait(
    process: subprocess.Popen[bytes],
    watched: set[signal.Signals],
    folder: Path,
    plan: Mapping[str, Any] | None,
    row: _Row | None,
    every_s: float,
    stream: TextIO,
) -> None:
    """Show and hand signals on until the program has ended."""
    next_s = time.monotonic() + (0 if row is not None else every_s)
    shown = ""
    while process.poll() is None:
        got = signal.sigtimedwait(watched, _LIVE_EVERY_S)
        if (
            got is not None and got.si_signo in _HANDED_ON and got.si_code <= 0
        ):  # sent by a process, not by a key
            process.send_signal(got.si_signo)
        if row is not None and got is not None and got.si_signo == signal.SIGWINCH:
            row.open()
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + (_LIVE_EVERY_S if row is not None else every_s)
        line = live_line(folder, plan)
        if line is None:
            continue
        if row is not None:
            row.show(line)
        elif line != shown:
            print(f"offload watch: {line}", file=stream, flush=True)
        shown = line


def live_line(folder: Path, plan: Mapping[str, Any] | None) -> str | None:
    """Return the newest line of the rank that holds most, None before any rank has stepped."""
    seen = [each for each in _samples(folder) if each["now"]]
    if not seen:
        return None
    fullest = max(seen, key=lambda each: (each["peak"] or {}).get("bytes", 0))
    among = f"of {len(seen)} processes the fullest: " if len(seen) > 1 else ""
    return among + report.live(fullest, report.planned(plan or fullest["plan"]))


def last_lines(folder: Path, plan: Mapping[str, Any] | None) -> list[str]:
    """Return a line of each process that has trained."""
    samples = _samples(folder)
    trained = [each for each in samples if each["steps"]]
    if trained:
        by_rank = sorted(
            trained, key=lambda each: (len(each["rank"] or ""), each["rank"] or "", each["process"])
        )
        return [report.last(each, report.planned(plan or each["plan"])) for each in by_rank]
    if samples:
        return ["no optimizer stepped, so nothing is known of whose the bytes were"]
    return [
        "no torch was seen: the program imports none, ended before, or runs its Python with -I or -E, "
        "which ignore PYTHONPATH"
    ]


def _samples(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return found


def _is_live(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Row:
    """The terminal's last row, outside the region in which the program's output scrolls (DECSTBM)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = False
        self.open()

    def open(self) -> None:
        """Take the last row, also anew where the window's size has changed."""
        size = os.get_terminal_size(self._stream.fileno())
        self._lines, self._columns = size.lines, size.columns
        if self._lines < 3 or self._columns < 20:
            return
        # A line up for the text in the last row, then the region, whose setting moves the cursor.
        self._write(f"\n\x1b7\x1b[1;{self._lines - 1}r\x1b8\x1b[1A")
        self._is_open = True

    def show(self, text: str) -> None:
        """Show `text`, cut to the width."""
        if self._is_open:
            self._write(f"\x1b7\x1b[{self._lines};1H\x1b[2K\x1b[7m{text[: self._columns - 1]}\x1b[0m\x1b8")

    def close(self) -> None:
        """Give the row back."""
        if self._is_open:
            self._is_open = False
            self._write(f"\x1b7\x1b[r\x1b[{self._lines};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        # One write, so that nothing of the program's comes between its parts.
        self._stream.flush()
        os.write(self._stream.fileno(), text.encode())
