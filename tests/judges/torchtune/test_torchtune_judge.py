# SPDX-License-Identifier: Apache-2.0
"""A small sample of the configurations that `make test-torchtune` judges at length."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torchtune_judge as judge

RELEASES = judge.installed()


@pytest.mark.parametrize("version", RELEASES or ["none"])
def test_a_sample_of_configurations_is_judged_as_the_recipes_do(version: str) -> None:
    if version == "none":
        pytest.skip("needs torchtune's recipes: make test-torchtune")
    heard = judge.answers(version, range(120))
    assert not judge.judged(heard, judge.JUDGED)


def test_the_judge_sees_that_a_rule_is_missing() -> None:
    if not RELEASES:
        pytest.skip("needs torchtune's recipes: make test-torchtune")
    version = RELEASES[-1]
    heard = judge.answers(version, range(150))
    others = [rule for rule in judge.JUDGED if rule.id != "tt-ao-needs-ac"]
    assert any("no rule has the text" in problem for problem in judge.judged(heard, others))
