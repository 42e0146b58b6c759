"""Mended faults, put back one at a time: the campaign must find each.

A mutation is a function that patches the package and returns nothing; it runs in a child process of its own, so nothing
has to be undone. Whoever mends a fault adds what puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MUTATIONS: dict[str, Callable[[], None]] = {}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Put the fault `name` back."""
    if name is not None:
        MUTATIONS[name]()
    yield
