# SPDX-License-Identifier: Apache-2.0
"""All combinations of parameters, of which the fast tier runs each `every`-th: each value, and none twice as often."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turns(*, every: int = 2, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations of `axes`; those whose numbers add up to no multiple of `every` are slow.

    So each value of an axis stays in the fast tier beside changing values of the others, as long as another axis has
    `every` values; of three such axes each pair of values does.
    """
    listed = [list(values) for values in axes.values()]
    assert sorted(map(len, listed))[-1] >= every, f"no axis has {every} values"
    cases = [
        pytest.param(
            *(value for _, value in case),
            id="-".join(_name(value, number) for number, value in case),
            marks=[] if sum(number for number, _ in case) % every == 0 else pytest.mark.slow,
        )
        for case in product(*map(enumerate, listed))
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def _name(value: Any, number: int) -> str:
    return str(value).replace(" ", "_") if isinstance(value, str | bool | int | float) else str(number)
