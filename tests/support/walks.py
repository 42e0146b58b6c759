# SPDX-License-Identifier: Apache-2.0
"""Finds which modules have a value in their hands while something runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType


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
