# SPDX-License-Identifier: Apache-2.0
"""MindSpeed-LLM's commands: Megatron-LM's flags beside MindSpeed's own, on which Megatron's rules stay."""

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.rules.lint import lint

START = "torchrun posttrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16"


def mindspeed(options: str) -> Config:
    return read_text(f"{START} {options}\n", "run.sh")


def found(options: str) -> set[str]:
    return {finding.rule for finding in lint(mindspeed(options)).findings if finding.severity != "info"}


def test_an_option_of_mindspeed_is_no_slip_of_megatron() -> None:
    assert (
        found("--use-fused-rmsnorm --use-flash-attn --swap-attention --swap-modules self_attention") == set()
    )
    assert mindspeed("--tensor-model-parallel-size 8").value("tensor_model_parallel_size") == 8


def test_states_swap_where_the_optimizer_is_distributed() -> None:
    assert found("--swap-optimizer") == {"msl-swap-distributed"}
    assert found("--swap-optimizer --optimizer dist_muon") == set()
    assert found("--swap-optimizer --use-distributed-optimizer") == set()
    assert found("--swap-optimizer --use-distributed-optimizer --reuse-fp32-param") == {"msl-swap-reuse"}


def test_options_of_adaptive_recompute_are_mindspeeds_and_not_mindspeed_llms() -> None:
    assert found("--swap-attention --adaptive-recompute-device-swap") == {"msl-unknown-option"}


def test_rules_about_megatrons_code_apply_to_it() -> None:
    assert "oc-needs-precision-aware" in found("--optimizer-cpu-offload")


def test_an_option_takes_one_word_and_the_next_ends_the_run() -> None:
    assert found('--load "my model"') == set()
    config = mindspeed("--load my model")
    assert config.value("load") == "my"
    (finding,) = lint(config).findings
    assert finding.rule == "wrong-type"
    assert finding.message.endswith("expected one word: 'model' is left over")


def test_npus_are_not_planned_for(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"  # type: ignore[operator]
    for sizes in (
        "",
        "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1",
    ):
        script.write_text(f"{START} {sizes}\n")
        assert main(["plan", str(script), "--gpu", "h100", "--host-memory", "1TB"]) == 2
        assert "trains on NPUs" in capsys.readouterr().err
