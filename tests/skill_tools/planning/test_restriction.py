# SPDX-License-Identifier: Apache-2.0
"""`plan --only` and `--without`: searched mechanisms, excluded ones, and the answer when nothing fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.planning.search.restriction import FAMILIES

BRIDGE = str(root() / "evals" / "files" / "override_30b.yaml")
BRIDGE_WORDS = (BRIDGE, "--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h100")
LOOP_WORDS = ("--framework", "pytorch", "--model", "llama-3.2-3b", "--gpu", "rtx4090")


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["plan", "--format", "json", *words])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def options(plan: dict[str, Any]) -> list[dict[str, Any]]:
    recommended = [plan["recommendation"]["option"]] if "recommendation" in plan else []
    return [*recommended, *plan["alternatives"], *(way["option"] for way in plan.get("ways", []))]


@pytest.mark.parametrize("words", [BRIDGE_WORDS, LOOP_WORDS], ids=["bridge", "loop"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_nothing_but_the_named_family_is_searched(
    words: tuple[str, ...], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(*words, "--only", family, capsys=capsys)
    assert options(plan)
    for option in options(plan):
        assert set(option["mechanisms"]) <= set(FAMILIES[family])


def test_recomputation_stays_as_the_run_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu-memory", "44GB", "--only", "optimizer")
    best = planned(*BRIDGE_WORDS, *words, capsys=capsys)["recommendation"]["option"]
    assert best["mechanisms"] == ["optimizer-offload"]
    assert "recompute_granularity" not in best["settings"]


def test_checkpointing_that_the_run_has_is_no_mechanism_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "base_model: NousResearch/Meta-Llama-3.1-8B\nsequence_len: 4096\nmicro_batch_size: 1\n"
        "gradient_checkpointing: true\noptimizer: adamw_torch\nlearning_rate: 1e-5\n"
        "fsdp_version: 2\nfsdp_config: {offload_params: false}\n"
    )
    words = ("--gpus", "8", "--gpu", "a100-80gb", "--only", "weights")
    for option in options(planned(str(run), *words, capsys=capsys)):
        assert set(option["mechanisms"]) <= {"recompute", "parameter-offload"}
        assert option["settings"].get("gradient_checkpointing", True)


@pytest.mark.parametrize("option", ["--only", "--without"])
def test_several_are_given_with_commas_or_one_by_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    together = planned(*LOOP_WORDS, option, "optimizer,recompute", capsys=capsys)
    one_by_one = planned(*LOOP_WORDS, option, "optimizer", option, "recompute", capsys=capsys)
    assert together["recommendation"] == one_by_one["recommendation"]
    used = {mechanism for each in options(together) for mechanism in each["mechanisms"]}
    assert ("recompute" in used) == (option == "--only")
    assert not used & {"optimizer-offload", "state-offload"} or option == "--only"


def test_a_family_less_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(*LOOP_WORDS, "--only", "weights", "--without", "trained-layer-streaming", capsys=capsys)
    assert all(not option["mechanisms"] for option in options(plan))


def test_where_nothing_fits_the_answer_names_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BRIDGE_WORDS, "--gpu-memory", "36GB", "--only", "optimizer"]) == 2
    said = capsys.readouterr().out
    assert "left out, as --only and --without say: fine-grained-offload, layer-activation-offload, " in said
    assert "with them fits: full recompute + optimizer offload" in said


def test_without_a_restriction_nothing_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BRIDGE_WORDS, "--gpu-memory", "16GB"]) == 2
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--only", "--without"])
def test_an_unknown_name_is_answered_with_the_known_ones(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *BRIDGE_WORDS, option, "optimizer,optimiser"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{option} 'optimiser'; expected one of optimizer, activations, weights, layers, " in captured.err
