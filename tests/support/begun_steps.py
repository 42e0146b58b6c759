# SPDX-License-Identifier: Apache-2.0
"""Watches begun steps: whether a thread is inside `step.as_one`, where everything has been allocated before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reference_impl.optimizers.step import as_one
from reference_impl.optimizers.streamed import packing

_inside = threading.local()


def carries_out() -> bool:
    """Return whether the calling thread carries out a begun step."""
    return getattr(_inside, "depth", 0) > 0


def may_allocate() -> bool:
    """Return whether the operator is outside a begun step, or part of one kernel of such a step."""
    return not carries_out() or getattr(_inside, "is_kernel", False)


def allocates(func: Any) -> bool:
    """Return whether an operator of torch returns memory of its own, by its schema."""
    return any(result.alias_info is None and "Tensor" in str(result.type) for result in func._schema.returns)


@contextmanager
def watched() -> Iterator[None]:
    """Have `carries_out` tell, inside."""
    enter, leave, as_blocks = as_one.__enter__, as_one.__exit__, packing.block_by_block

    def entered(region: Any) -> Any:
        entered_region = enter(region)
        _inside.depth = getattr(_inside, "depth", 0) + 1
        return entered_region

    def left(region: Any, *error: Any) -> None:
        _inside.depth -= 1
        leave(region, *error)

    def one_kernel(numel: int, part: Callable[[slice], Any]) -> None:
        # A compiled kernel's registers are temporaries on the twin.
        _inside.is_kernel = True
        try:
            as_blocks(numel, part)
        finally:
            _inside.is_kernel = False

    as_one.__enter__, as_one.__exit__ = entered, left  # type: ignore[method-assign]
    packing.block_by_block = one_kernel
    try:
        yield
    finally:
        as_one.__enter__, as_one.__exit__ = enter, leave  # type: ignore[method-assign]
        packing.block_by_block = as_blocks
        _inside.depth = 0
