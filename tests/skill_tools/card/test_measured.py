# SPDX-License-Identifier: Apache-2.0
"""Ratios and savings follow from the rows; a row that lacks a number has none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.card.measurements import measured_range, saved_gb, slowdown

POSITIVE = st.floats(min_value=0.1, max_value=1e4)


def card(*rows: dict[str, Any]) -> dict[str, Any]:
    base = {"id": "base", "status": "success", "step_ms": 100.0, "peak_gb": 10.0}
    return {
        "measured_results": [base, *rows],
        "validation_status": {"claim": {"status": "measured", "rows": [row["id"] for row in rows]}},
    }


def row(**values: Any) -> dict[str, Any]:
    return {"id": "row", "baseline": "base", "status": "success", **values}


@given(POSITIVE, POSITIVE)
def test_ratio_and_saving(step_ms: float, peak_gb: float) -> None:
    one = row(step_ms=step_ms, peak_gb=peak_gb)
    assert slowdown(card(one), one) == pytest.approx(step_ms / 100)
    assert saved_gb(card(one), one) == pytest.approx(10 - peak_gb)


@pytest.mark.parametrize("one", [row(), {"id": "row", "status": "success", "step_ms": 1.0}])
def test_no_number_no_ratio(one: dict[str, Any]) -> None:
    assert slowdown(card(one), one) is None
    assert saved_gb(card(one), one) is None


def test_a_run_that_failed_saved_nothing() -> None:
    one = row(status="oom", peak_gb=9.0)
    assert saved_gb(card(one), one) is None


def test_the_range_spans_the_rows_that_have_the_number() -> None:
    fast, slow, failed = row(step_ms=110.0), row(id="slow", step_ms=400.0), row(id="failed", status="oom")
    assert measured_range(card(fast, slow, failed), "claim", "ratio") == (1.1, 4.0)
    assert measured_range(card(failed), "claim", "ratio") is None
    assert measured_range(card(fast), "claim", "percent") is None
