"""One cost of a step: work that a mode adds, and the part of it that compute does not hide."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of `work_s` of which `exposed_s` lengthen the step, by a formula in words."""

    name: str
    work_s: float
    exposed_s: float
    formula: str
