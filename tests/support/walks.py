# SPDX-License-Identifier: Apache-2.0
"""Finds the modules passed by a value while something runs, and the ones listed in docs/design.md."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def section(walk: str) -> str:
    """Return the text under a walk's title in docs/design.md."""
    return DESIGN.read_text(encoding="utf-8").partition(f"### {walk}\n")[2].partition("\n### ")[0]


def listed(walk: str) -> list[str]:
    """Return the modules that docs/design.md numbers under a walk's title."""
    return re.findall(r"^\d+\. `([^`]+)`", section(walk), re.MULTILINE)


def holders(
    package: ModuleType, action: Callable[[], object], holds: Callable[[object], bool], until: Callable
) -> list[str]:
    """Return the modules of `package` in which a local variable or a result `holds` the value, in order.

    They are paths from the folder that the package is in. The walk ends when the function `until` first returns.
    """
    root = Path(package.__file__ or "").parent
    found: dict[str, None] = {}
    ended = False

    def note(frame: FrameType, event: str, result: object) -> None:
        nonlocal ended
        file = frame.f_code.co_filename
        if ended or event != "return" or not file.startswith(str(root)):
            return
        if any(map(holds, (*frame.f_locals.values(), result))):
            found.setdefault(str(Path(file).relative_to(root.parent)))
        ended = frame.f_code is until.__code__

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    assert ended, f"{until.__qualname__} has not run"
    return list(found)


def callers(package: ModuleType, action: Callable[[], object], moments: list[Callable]) -> list[str]:
    """Return the modules of `package` that have a function running when one of `moments` is called, in order.

    Threads that `action` starts count too. Each of `moments` has to be called.
    """
    folder = Path(package.__file__ or "").parent
    codes = {each.__code__: each.__qualname__ for each in moments}
    root = folder.parents[len(package.__name__.split(".")) - 1]
    found: dict[str, None] = {}
    missed = set(codes.values())

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if frame is None or event != "call" or frame.f_code not in codes:
            return
        missed.discard(codes[frame.f_code])
        running = []
        while frame is not None:
            running.append(frame.f_code.co_filename)
            frame = frame.f_back
        for file in reversed(running):
            if file.startswith(str(folder)):
                found.setdefault(str(Path(file).relative_to(root)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert not missed, f"{sorted(missed)} have not run"
    return list(found)
