# SPDX-License-Identifier: Apache-2.0
"""The two card schemas: ours passes the strict one, published cards pass the base where they deserve it."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from skill_tools.bundle import root, schema_path
from skill_tools.card.load import load_card, schema_problems
from skill_tools.errors import UnusableInput

CORPUS = root().parent / "shared" / "corpus" / "cards"

WEAK_CARDS = {
    "nemo-mbridge-perf-expert-parallel-overlap": "high_for_measured_shape",
    "nemo-mbridge-perf-moe-hardware-configs": "current_recipe_seed",
}
SOUND_CARDS = (
    "nemo-mbridge-mlm-bridge-training",
    "nemo-mbridge-perf-cpu-offloading",
    "nemo-mbridge-perf-megatron-fsdp",
    "nemo-mbridge-perf-moe-comm-overlap",
    "nemo-mbridge-perf-moe-optimization-workflow",
    "nemo-mbridge-perf-parallelism-strategies",
    "nemo-mbridge-perf-tp-dp-comm-overlap",
)


@pytest.fixture
def card() -> dict[str, Any]:
    return copy.deepcopy(dict(load_card(root() / "card.yaml")))


def published(name: str) -> dict[str, Any]:
    if not CORPUS.is_dir():
        pytest.skip("the published cards are not part of the repository")
    loaded: dict[str, Any] = yaml.safe_load((CORPUS / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", ["card", "card.base"])
def test_each_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_path(name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("schema", ["card", "card.base"])
def test_our_card_passes(card: dict[str, Any], schema: str) -> None:
    assert schema_problems(card, schema) == []


@pytest.mark.parametrize("name", SOUND_CARDS)
def test_a_sound_published_card_passes_the_base(name: str) -> None:
    assert schema_problems(published(name), "card.base") == []


@pytest.mark.parametrize("name", SOUND_CARDS)
def test_no_published_card_passes_the_strict_profile(name: str) -> None:
    assert schema_problems(published(name)) != []


@pytest.mark.parametrize(("name", "reason"), WEAK_CARDS.items())
def test_a_weak_published_card_fails_for_its_defect(name: str, reason: str) -> None:
    assert any(reason in problem for problem in schema_problems(published(name), "card.base"))


@pytest.mark.parametrize(
    "key", ["mechanisms", "decisions", "measured_settings", "validation_status", "title"]
)
def test_a_missing_key_is_named(card: dict[str, Any], key: str) -> None:
    del card[key]
    assert any(key in problem for problem in schema_problems(card))


def test_a_key_beside_the_profile_is_refused(card: dict[str, Any]) -> None:
    card["key_lessons"] = ["measure"]
    assert any("key_lessons" in problem for problem in schema_problems(card))


@pytest.mark.parametrize(
    "claim",
    [
        ["code_verified"],
        {"status": "code_verified"},
        {
            "status": "code_verified",
            "upstream": "megatron-lm",
            "ref": "a/b.py:12",
            "quote": "raise ValueError",
        },
        {"status": "measured", "quote": "1.9x slower on my machine"},
        {"status": "measured", "rows": []},
    ],
)
def test_a_claim_without_its_evidence_is_refused(card: dict[str, Any], claim: Any) -> None:
    card["validation_status"]["new_claim"] = claim
    assert any("new_claim" in problem for problem in schema_problems(card))


def test_a_number_is_a_number(card: dict[str, Any]) -> None:
    card["measured_results"][0]["step_ms"] = "996 ms"
    assert any("measured_results/0/step_ms" in problem for problem in schema_problems(card))


@pytest.mark.parametrize("text", ["- a\n- b\n", "title: [\n", "title: a: b\n"])
def test_a_file_that_is_no_card_is_unusable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UnusableInput, match=r"card\.yaml"):
        load_card(path)


def test_a_missing_card_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="cannot be read"):
        load_card(tmp_path / "card.yaml")
