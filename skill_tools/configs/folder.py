"""Finds the files of a folder that may be configurations, in a fixed order and within bounds.

Apart because no other reader looks at more than the file that it was named.
"""

import os
from collections.abc import Iterator

from skill_tools.configs.source import looks_like_configuration
from skill_tools.errors import UnusableInput

MAX_FILES = 20_000
MAX_ENTRIES = 200_000

# Folders whose files nobody trains from: what tools keep, and the packages that they install.
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
