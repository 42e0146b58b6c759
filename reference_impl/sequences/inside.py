# SPDX-License-Identifier: Apache-2.0
"""Whether this thread computes a part of a call: a tile, or a group of heads. Calls inside are not divided again.

A module in a tile may join several sequences to more positions than a tile has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reference_impl.activations.attach import Forward


class Inside:
    """Where a thread is: true inside a forward of `around`, or the context of `entered`."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __bool__(self) -> bool:
        return getattr(self._here, "depth", 0) > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside."""
        self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            yield
        finally:
            self._here.depth -= 1

    def around(self, forward: Forward) -> Forward:
        """Return `forward` that is inside while it runs."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                return forward(*args, **kwargs)

        return inside


A_PART = Inside()
