# SPDX-License-Identifier: Apache-2.0
"""A small sample of the configurations that `make test-llama-factory` judges at length."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import llama_factory_judge as judge

RELEASES = judge.installed()


@pytest.mark.parametrize("version", RELEASES[-1:] or ["none"])
def test_a_sample_of_configurations_is_judged_as_the_parser_does(version: str) -> None:
    if version == "none":
        pytest.skip("needs LLaMA-Factory's parser: make test-llama-factory")
    heard = judge.answers(version, judge.TRANSFORMERS[version][-1], 100)
    assert not judge.judged(heard, judge.JUDGED)
    others = [rule for rule in judge.JUDGED if rule.id != "lf-pure-bf16-zero3"]
    assert judge.judged(heard, others)
