"""Reads the bytes of a file that a user names: of a real file only, and never more than its reader can use.

Reading a device would never end, and a pipe may have no writer.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from skill_tools.errors import UnusableInput

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
        return file.read(at_most)


@contextmanager
def open_file(path: str | Path, *, expected: str, attempt: str = "checking the path") -> Iterator[BinaryIO]:
    """Open the file at `path` to read it.

    Raises `UnusableInput`, with what was `expected` and what to try, where there is no file that can be read.
    """
    name = str(path)
    try:
        # Opened without waiting, then asked what it is: a name could be another thing by the time it is opened.
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


def replace_text(path: str | Path, text: str) -> None:
    """Put `text` in the place of what the file at `path` holds: all of it or, whatever fails, none.

    The file keeps its mode and owner; through a link, what it points to is replaced. Raises `UnusableInput` where it
    cannot be written.
    """
    import tempfile

    target = os.path.realpath(path)
    temporary = ""
    try:
        before = os.stat(target)
        if before.st_nlink > 1:  # another name would go on holding the old text
            raise OSError(errno.EMLINK, "it has a second name, a hard link")
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
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
            expected="a file that may be written, in a folder that may be written",
            attempt="--diff, which prints the change",
        ) from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
