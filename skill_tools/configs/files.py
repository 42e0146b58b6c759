# SPDX-License-Identifier: Apache-2.0
"""Finds and reads a file that a user names: a real file only, and never more of it than its reader can use.

Reading a device would never end, and a pipe may have no writer. Size limits and encodings are checked here, once, so
later readers may assume short Unicode text.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from skill_tools.errors import UnusableInput

MAX_BYTES = 1024 * 1024
_MOST_LEVELS = 5  # above a script, up to the root of its project

_FOREIGN_MARKS = (b"\xff\xfe", b"\xfe\xff")
_WHAT = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def read_bytes(path: str | Path, at_most: int, *, expected: str, attempt: str = "checking the path") -> bytes:
    """Return the first `at_most` bytes of the file at `path`; raises `UnusableInput` as `open_file` does."""
    with open_file(path, expected=expected, attempt=attempt) as file:
        # To make room for `at_most` bytes takes longer than to read a small file. One in /proc has more than its size.
        size = os.fstat(file.fileno()).st_size
        start = file.read(min(size + 1, at_most))
        return start if len(start) <= size else start + file.read(at_most - len(start))


@contextmanager
def open_file(path: str | Path, *, expected: str, attempt: str = "checking the path") -> Iterator[BinaryIO]:
    """Open the file at `path` to read it.

    Raises `UnusableInput`, with the `expected` file and advice, if the file cannot be read.
    """
    name = str(path)
    try:
        # Opened without waiting, then asked for its type: a name could be another thing by the time it is opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
            if kind != stat.S_IFREG:
                raise UnusableInput(
                    f"{name!r} is {_WHAT.get(kind, 'no file')}", expected=expected, attempt=attempt
                )
            yield file
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise UnusableInput(f"cannot read {name!r} ({reason})", expected=expected, attempt=attempt) from error
    except ValueError as error:
        raise UnusableInput(
            f"{name!r} is not a path", expected=expected, attempt="checking the name"
        ) from error


def find_file(path: str, folders: Iterable[Path]) -> Path | None:
    """Return where `path` is, seen from one of `folders` or from the working folder; None if it is not there.

    A relative path with a folder in it is also looked for from the folders that those lie in, because scripts are
    started from the root of their project (`./scripts/zero3.json` in train/run.sh).
    """
    started = list(folders)
    for folder in (*started, Path()):
        try:
            if (candidate := folder / path).is_file():
                return candidate
        except (OSError, ValueError):
            return None
    if path.startswith("/") or "/" not in path.removeprefix("./"):
        return None
    above = (level for folder in started for level in Path(os.path.abspath(folder)).parents[:_MOST_LEVELS])
    return next((level / path for level in above if (level / path).is_file()), None)


def read_text(
    path: str | Path, *, expected: str = "a file: YAML, TOML, shell script, Python recipe or JSON"
) -> str:
    """Return the text of the file at `path`; raises `UnusableInput` when it is missing, too large, or not UTF-8.

    `expected` names the file that it should be.
    """
    return decode(read_bytes(path, MAX_BYTES + 1, expected=expected), str(path))


def decode(data: bytes, name: str) -> str:
    """Return `data` as text; raises `UnusableInput` for anything but UTF-8 text of at most `MAX_BYTES`."""
    if len(data) > MAX_BYTES:
        raise UnusableInput(
            f"{name} is larger than {MAX_BYTES // 1024**2} MiB",
            expected="a training configuration",
            attempt="the configuration itself, without data or logs",
        )
    if data.startswith(_FOREIGN_MARKS):
        raise _not_utf8(name, 1, "it begins with a UTF-16 or UTF-32 mark")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(name, data.count(b"\n", 0, error.start) + 1, "a byte is not UTF-8") from error
    if "\0" in text:
        raise _not_utf8(name, text.count("\n", 0, text.index("\0")) + 1, "it holds a NUL byte")
    return text


def _not_utf8(name: str, line: int, what: str) -> UnusableInput:
    return UnusableInput(
        f"{name}:{line} is not text in UTF-8 ({what})",
        expected="a configuration as text",
        attempt="saving the file as UTF-8",
    )


def replace_text(path: str | Path, text: str, *, attempt: str = "--diff, which prints the change") -> None:
    """Put `text` in the place of the contents of the file at `path`: all of it or, whatever fails, none.

    The file keeps its mode and owner; through a link, its target is replaced. Raises `UnusableInput`, with
    the advice `attempt`, if it cannot be written, or is a device or a pipe (the new file would replace it).
    """
    import tempfile

    target = os.path.realpath(path)
    temporary = ""
    try:
        before = _replaceable(target)
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".offload-")
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, stat.S_IMODE(before.st_mode))
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(temporary, before.st_uid, before.st_gid)
        os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        reason = (error.strerror or "no reason given").lower()
        raise UnusableInput(
            f"cannot write {str(path)!r} ({reason}), so it is as it was",
            expected="a writable file in a writable folder",
            attempt=attempt,
        ) from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def _replaceable(target: str) -> os.stat_result:
    """Return the file status of `target`; raises OSError if it must not be replaced."""
    before = os.stat(target)
    if not stat.S_ISREG(before.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if before.st_nlink > 1:  # another name would go on holding the old text
        raise OSError(errno.EMLINK, "it has a second name, a hard link")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return before


def check_writable(path: str | Path) -> None:
    """Raise `UnusableInput` where `write_text` would, before its text is computed."""
    try:
        if os.path.exists(path):
            _replaceable(os.path.realpath(path))
        else:
            folder = os.path.dirname(path) or os.curdir
            os.scandir(folder).close()
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from error


def _not_written(path: str | Path, error: Exception) -> UnusableInput:
    reason = getattr(error, "strerror", None) or str(error)
    return UnusableInput(
        f"cannot write {str(path)!r} ({reason})",
        expected="a file in a folder that may be written",
        attempt="another path",
    )


def write_text(path: str | Path, text: str) -> None:
    """Put `text` into the file at `path`, all of it or none; raises `UnusableInput` where it cannot be written."""
    try:
        if not os.path.exists(path):
            with open(path, "x", encoding="utf-8"):
                pass
    except (OSError, ValueError) as error:
        raise _not_written(path, error) from error
    replace_text(path, text, attempt="another path")
