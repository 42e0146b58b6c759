"""Whether this thread computes a part of a call: a tile, or a group of heads. What is inside is not divided again.

A module in a tile may join several sequences to more positions than a tile has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reference_impl.activations.attach import Forward

_here = threading.local()


def is_inside() -> bool:
    """Whether this thread computes a part."""
    return getattr(_here, "parts", 0) > 0


@contextmanager
def inside() -> Iterator[None]:
    """Compute a part."""
    _here.parts = getattr(_here, "parts", 0) + 1
    try:
        yield
    finally:
        _here.parts -= 1


def inside_of(forward: Forward) -> Forward:
    """Return `forward` as the part of a call."""

    def part(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return forward(*args, **kwargs)

    return part
