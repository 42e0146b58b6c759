"""One line of a plan's two accounts, memory and time, each with its formula."""

from typing import NamedTuple


class Line(NamedTuple):
    """A line of the memory account: `bytes` under a name, by a formula in words.

    `when` says when it is alive: `always`; `between`, from step to the end of forward, and `forward`; `step`, from
    forward to the end of backward; `loss`, at the start of backward, and then `head`; `recompute`, while a layer is
    computed again, `last block` and `first block`, in their backward, and `embedding`, in its; `backward`, grown by its
    end; `update`, while the optimizer steps; `reserve`, outside of the allocator.
    """

    name: str
    bytes: int
    formula: str
    when: str = "always"


class Cost(NamedTuple):
    """A line of the time account: `work_s` that a mode adds, of which `exposed_s` lengthen the step."""

    name: str
    work_s: float
    exposed_s: float
    formula: str


def each(bytes_each: float, count: int, what: str) -> str:
    """Write `4 B x 1,000 parameters`."""
    return f"{bytes_each:g} B x {count:,} {what}"
