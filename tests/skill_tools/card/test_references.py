# SPDX-License-Identifier: Apache-2.0
"""Names in the card must exist, and repeated facts must agree with their source."""

import copy
from typing import Any

import pytest

from skill_tools.bundle import root
from skill_tools.card.load import load_card
from skill_tools.card.references import reference_problems

RAISES = {"la-pp": ["Currently there is no support for Pipeline parallelism with CPU offloading"]}


@pytest.fixture
def card() -> dict[str, Any]:
    whole = copy.deepcopy(dict(load_card(root() / "card.yaml")))
    for field in ("decisions", "interactions", "failure_modes", "known_constraints", "known_limitations"):
        whole[field] = [one for one in whole[field] if one.get("rule", "la-pp") == "la-pp"]
    whole["seed_corrections"] = []
    whole["feature_meaning"] = {}
    return whole


def problems(card: dict[str, Any]) -> list[str]:
    written = {*card["config_keys"]}
    for frameworks in card["recommended_path"].values():
        written |= {key for settings in frameworks.values() for key in settings}
    return reference_problems(card, raises=RAISES, spellings={"every": written - {"model.typo"}})


def test_the_card_without_foreign_rules_is_sound(card: dict[str, Any]) -> None:
    assert problems(card) == []


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("rule", "la-gone", "no such rule: la-gone"),
        ("rows", ["gone"], "no such measured row: gone"),
    ],
)
def test_a_decision_that_points_nowhere(card: dict[str, Any], field: str, value: Any, complaint: str) -> None:
    card["decisions"][0][field] = value
    assert any("/decisions/0/" in problem and complaint in problem for problem in problems(card))


def test_a_row_without_its_setting_baseline_or_mechanism(card: dict[str, Any]) -> None:
    card["measured_results"].append(
        {"id": "new", "setting": "s", "what": "w", "status": "oom", "mechanism": "m", "baseline": "b"}
    )
    found = "\n".join(problems(card))
    assert "no such measured setting: s" in found
    assert "no such mechanism: m" in found
    assert "no such measured row: b" in found


def test_a_symptom_in_other_words_than_the_rule(card: dict[str, Any]) -> None:
    card["failure_modes"][0]["symptom"] = "No pipeline with offloading"
    assert any("no message of la-pp" in problem for problem in problems(card))


def test_a_magnitude_that_the_rows_do_not_give(card: dict[str, Any]) -> None:
    card["expected_metric_change"][0]["magnitude"]["high"] = 9.9
    assert any("gives 1.88 to 4.21, not 1.88 to 9.9" in problem for problem in problems(card))


def test_a_source_that_no_claim_quotes(card: dict[str, Any]) -> None:
    card["evidence"].append("megatron-lm: setup.py")
    assert any("setup.py is quoted by no claim" in problem for problem in problems(card))


def test_a_source_that_is_quoted_and_not_listed(card: dict[str, Any]) -> None:
    del card["evidence"][0]
    assert any("is not listed" in problem for problem in problems(card))


def test_a_key_that_no_framework_knows(card: dict[str, Any]) -> None:
    card["config_keys"].append("model.typo")
    assert any("model.typo" in problem for problem in problems(card))
