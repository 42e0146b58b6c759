# SPDX-License-Identifier: Apache-2.0
"""Standard output: whose eyes read it, whether it has colours, and how wide it is.

`NO_COLOR`, `FORCE_COLOR`, `TERM=dumb` and `COLUMNS` hold in the order of Python's own command line, in pipes as on
terminals: people read a CI's log, a pipe.
"""

import os
import sys
from typing import TextIO


def is_for_people(stream: TextIO) -> bool:
    """Return whether a terminal is at the other end, or somebody has said that colours arrive there."""
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


def has_colours(stream: TextIO) -> bool:
    """Return whether to write colours: <https://no-color.org> first, then <https://force-color.org>."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def columns(stream: TextIO) -> int | None:
    """Return how many columns there are; None where neither `COLUMNS` nor a terminal says it."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def print_markdown(text: str) -> None:
    """Print `text` laid out for people; a pipe's reader, and who has no rich, gets it as it is."""
    if not is_for_people(sys.stdout):
        print(text, end="")
        return
    try:
        from rich.console import Console
        from rich.markdown import Markdown
    except ImportError:
        print(text, end="")
        return
    width = columns(sys.stdout) or 80
    console = Console(width=min(width, 110), force_terminal=True, no_color=not has_colours(sys.stdout))
    console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))
