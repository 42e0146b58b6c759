# SPDX-License-Identifier: Apache-2.0
"""Folds the shipped model profiles: a plan's parts of them, in a sixth of the room.

A profile is as `schema/model-profile.schema.json` says. Its blocks are alike, so each size of the spans and of the
layers becomes one list: the first number, then the differences. A zip compresses a run of one number to
nothing. `saved_by` and `alive_at_peak`, which people read, stay in `traces/`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Growth = Mapping[str, float]

_READ_BY_PEOPLE = ("saved_by", "alive_at_peak")
_BY_SPAN = ("peaks", "peaks_without_gradients")
_SIZES = ("fixed", "per_token", "per_token_and_length", "per_sequence")


def folded(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return `profile` as the index has it."""
    return {**profile, "steps": [_folded_step(step) for step in profile["steps"]]}


def unfolded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the profile of an entry of the index, without the parts for people."""
    return {**entry, "steps": [_unfolded_step(step) for step in entry["steps"]]}


def _folded_step(step: Mapping[str, Any]) -> dict[str, Any]:
    spans = list(step["peaks"])
    columns = {name: _columns([step[name][span] for span in spans]) for name in _BY_SPAN}
    kept = {name: value for name, value in step.items() if name not in _READ_BY_PEOPLE}
    return {**kept, **columns, "layers": _columns(step["layers"]), "spans": spans}


def _unfolded_step(step: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in step.items() if name != "spans"}
    peaks = {name: dict(zip(step["spans"], _growths(step[name]), strict=True)) for name in _BY_SPAN}
    return {**kept, **peaks, "layers": _growths(step["layers"])}


def _columns(growths: Sequence[Growth]) -> dict[str, list[float]]:
    """Return each size of `growths` that is not 0 everywhere: the first, then the differences."""
    numbers = {size: [growth.get(size, 0) for growth in growths] for size in _SIZES}
    return {size: [column[0], *_differences(column)] for size, column in numbers.items() if any(column)}


def _differences(column: Iterable[float]) -> Iterable[float]:
    return (after - before for before, after in pairwise(column))


def _growths(columns: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    length = max(map(len, columns.values()))
    numbers = {size: list(accumulate(columns.get(size, [0] * length))) for size in _SIZES}
    return [dict(zip(_SIZES, row, strict=True)) for row in zip(*numbers.values(), strict=True)]
