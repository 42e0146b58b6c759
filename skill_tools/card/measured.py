"""Arithmetic over the card's measured rows: ratios and savings against each row's baseline.

The card has times and bytes only: what follows from them cannot disagree with them.
"""

from collections.abc import Mapping
from typing import Any

from skill_tools.card.load import Card

Row = Mapping[str, Any]


def rows_by_id(card: Card) -> dict[str, Row]:
    """Return the measured rows under their ids."""
    return {row["id"]: row for row in card["measured_results"]}


def slowdown(card: Card, row: Row) -> float | None:
    """Return the row's step time as a ratio to its baseline's, or None where one of them is missing."""
    baseline = rows_by_id(card).get(row.get("baseline", ""))
    if baseline is None or "step_ms" not in row or "step_ms" not in baseline:
        return None
    return float(row["step_ms"] / baseline["step_ms"])


def saved_gb(card: Card, row: Row) -> float | None:
    """Return how many GB (decimal) the row's peak or allocated memory lies below its baseline's."""
    baseline = rows_by_id(card).get(row.get("baseline", ""))
    if baseline is None or row["status"] != "success":
        return None
    for field in ("peak_gb", "allocated_gb"):
        if field in row and field in baseline:
            return float(baseline[field] - row[field])
    return None


def measured_range(card: Card, claim: str, unit: str) -> tuple[float, float] | None:
    """Return the least and greatest ratio or saving (`unit` `ratio` or `GB`) of the rows behind `claim`."""
    rows = rows_by_id(card)
    names = card["validation_status"].get(claim, {}).get("rows", ())
    measure = {"ratio": slowdown, "GB": saved_gb}.get(unit)
    if measure is None:
        return None
    values = [value for name in names if name in rows if (value := measure(card, rows[name])) is not None]
    return (min(values), max(values)) if values else None
