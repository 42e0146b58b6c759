"""One line of a memory account, with the formula that made it."""

from typing import NamedTuple


class Line(NamedTuple):
    """`bytes` under a name, by a formula in words.

    `when` it is alive: `always`; `step`, from forward to the end of backward; `loss`, at the start of
    backward; `backward`, grown by its end; `update`, while the optimizer steps; `recompute`, while a layer
    is computed again; `reserve`, outside of the allocator.
    """

    name: str
    bytes: int
    formula: str
    when: str = "always"


def each(bytes_each: float, count: int, what: str) -> str:
    """Write `4 B x 1,000 parameters`."""
    return f"{bytes_each:g} B x {count:,} {what}"
