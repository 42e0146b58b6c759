# SPDX-License-Identifier: Apache-2.0
"""Looks beyond the named file: the configurations below a folder, and the checkout around a script."""

import os
from collections.abc import Iterator
from pathlib import Path

from skill_tools.configs.source import looks_like_configuration
from skill_tools.errors import UnusableInput

MAX_FILES = 20_000
MAX_ENTRIES = 200_000
MOST_LEVELS = 6  # from a script up to the root of its checkout

# Folders without configurations to train from: tools' caches and installed packages.
_LEFT_OUT = frozenset({"node_modules", "site-packages", "__pycache__"})
_ENVIRONMENT = "pyvenv.cfg"


def files_below(folder: str) -> Iterator[str]:
    """Yield the path of each file below `folder` whose suffix is a configuration's, folder by folder, sorted.

    Hidden folders, virtual environments and installed packages are left out, links to folders are not followed. Raises
    `UnusableInput` for more than `MAX_FILES` files, or `MAX_ENTRIES` entries of any kind.
    """
    files = entries = 0
    for path, folders, names in os.walk(folder):
        entries += len(folders) + len(names)
        if _ENVIRONMENT in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(names):
            if looks_like_configuration(name):
                files += 1
                yield os.path.join(path, name)
        if files > MAX_FILES or entries > MAX_ENTRIES:
            raise UnusableInput(
                f"{folder} holds more than {MAX_FILES} files that may be configurations, or {MAX_ENTRIES} of any kind",
                expected="a folder of configurations",
                attempt=f"a folder inside it, such as {os.path.join(folder, 'configs')}",
            )


def above(folder: Path | None, name: str) -> Path | None:
    """Return the nearest `name` in `folder` or one of the folders above it, if there is one.

    A script in a checkout of its framework, or in a fork, runs that code and no release. A project that has
    vendored one keeps its checkout in a folder of the package's name (`verl/verl/trainer` beside `scripts`).
    """
    if folder is None:
        return None
    start = Path(os.path.abspath(folder))
    vendored = f"{name.partition('/')[0]}/{name}"
    levels = (start, *list(start.parents)[: MOST_LEVELS - 1])
    found = (level / each for level in levels for each in (name, vendored))
    return next((path for path in found if path.exists()), None)
