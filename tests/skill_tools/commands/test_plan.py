# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main

MOE = ["--framework", "megatron-bridge", "--model", "qwen3-30b-a3b", "--overrides"]


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_pytorch_plan_follows_its_schema_and_can_be_executed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        "--model", "llama-3-8b", "--gpu", "h200", "--gpu-memory", "80GiB", "--format", "json", capsys=capsys
    )
    document = json.loads(out)
    assert_follows(document, "plan")
    assert code == 0
    assert document["execute"]["optimizer"]["offload_fraction"] > 0
    assert document["recommendation"]["option"]["memory"]["device_bytes"] <= 80 * 2**30


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "llama-3-8b", "--gpu-memory", "80parsecs"], "80parsecs"),
        (["--model", "llama-3-8b", "--gpu-memory=-3GiB"], "-3GiB"),
        (["--model", "llama-3-8b", "--gpu-memory", "0GiB"], "0GiB"),
        (["--model", "qwen9-7b", "--gpu-memory", "80GiB"], "qwen9-7b"),
        (["--model", "llama-3-8b", "--gpu", "rx9000"], "four numbers"),
        (["--model", "llama-3-8b", "--gpu", "tflops=1"], "four numbers"),
        (["--model", "llama-3-8b", "--gpus", "0"], "--gpus 0"),
        (["--model", "llama-3-8b", "--step-time", "-1"], "--step-time"),
        (["--model", "llama-3-8b", "--overrides", "seq_length"], "KEY=VALUE"),
        (["--model", "llama-3-8b", "--overrides", "num_query_groups=5"], "contradicts itself"),
        (["--model", "llama-3-8b", "--overrides", "hidden_size=wide"], "wide"),
        (["--model", "llama-3-8b", "--overrides", "model.num_layers=4"], "--framework megatron-bridge"),
        (["--model", "llama-3-8b", "--overrides", "seq_length=0"], "above zero"),
        (["--model", "llama-3-8b", "--overrides", "seq_length=1e400"], "1e400"),
        (["--model", "llama-3-8b", "--overrides", "lora_rank=-4"], "lora_rank"),
        (["--model", "llama-3-8b", "--overrides", "max_grad_norm=-1"], "no clipping"),
        (["--model", "llama-3-8b", "--overrides", "recompute_granularity=sometimes"], "full or none"),
        (["--model", "llama-3-8b", "--overrides", "vocab_size=0"], "contradicts itself"),
        ([*MOE, "model.tensor_model_parallel_size=3"], "32 attention heads do not divide"),
        ([*MOE, "model.expert_model_parallel_size=5"], "128 experts do not divide"),
        ([*MOE, "train.global_batch_size=0"], "above zero"),
        (
            [
                "--framework",
                "megatron-lm",
                "--model",
                "llama-3-8b",
                "--overrides=--pipeline-model-parallel-size 5",
            ],
            "pipeline_model_parallel_size=4",
        ),
        (["--overrides", "seq_length=4096", "run.yaml"], "putting files before --overrides"),
        (["--model", "qwen9-7b"], "--list-models"),
        ([], "--list-models"),
        (["--framework", "pytorch"], "--list-models"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(*arguments, capsys=capsys)
    assert code == 2
    assert named in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_bare_number_is_read_as_gib_and_the_plan_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan("--model", "qwen3-0.6b", "--gpu-memory", "80", "--details", capsys=capsys)
    assert code == 0
    assert "--gpu-memory 80 read as GiB" in out


def test_markdown_is_a_table_with_the_recommendation_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "llama-3-8b", "--gpu-memory", "80GiB", "--format", "markdown")
    _, out, _ = plan(*arguments, "--details", capsys=capsys)
    assert out.index("fits with ") < out.index("|---|")


def test_a_config_json_gives_the_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            }
        ),
        encoding="utf-8",
    )
    code, out, _ = plan(str(config), "--gpu-memory", "80GiB", "--format", "json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["model"]["parameters"] == 1235814400  # Llama 3.2 1B


def test_a_config_json_of_another_model_is_to_be_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "encodec", "architectures": ["EncodecModel"]}), encoding="utf-8"
    )
    code, _, err = plan(str(config), "--framework", "pytorch", "--gpu-memory", "80GiB", capsys=capsys)
    assert code == 2
    assert (
        "expected a config.json of a decoder, or another model traced; try --model NAME, or offload trace"
        in err
    )


def test_overrides_alone_are_those_of_the_stated_framework(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        "--model", "qwen3-30b-a3b", "--framework", "megatron-bridge", "--gpus", "16", "--gpu-memory", "80GB",
        "--overrides", "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2",
        "model.expert_model_parallel_size=4", "--details",
        capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert "TP 2, PP 2" in out
    assert "la-pp" in out


def test_a_plain_loop_by_its_sizes_is_told_what_was_assumed_and_how_to_carry_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["num_layers=28", "hidden_size=3072", "num_attention_heads=24", "vocab_size=128256"]
    code, out, _ = plan(
        "--framework", "pytorch", "--gpu", "rtx4090", "--details", "--overrides", *sizes, capsys=capsys
    )
    assert code == 0
    assert "gated_linear_unit=true" in out
    assert "apply_plan(model, optimizer" in out


def test_the_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan("--list-models", capsys=capsys)
    assert (code, err) == (0, "")
    names = out.split()
    assert "llama-3-8b" in names
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.yaml", "a: [1\n", "run.yaml:2:1 is not valid YAML"),
        ("run.json", '{"a": [1', "run.json:1:9 is not valid JSON"),
        ("run.toml", "a = [1\n", "run.toml is not valid TOML"),
    ],
)
def test_a_text_that_no_parser_takes_is_told_so(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, _, err = plan(str(tmp_path / name), capsys=capsys)
    assert code == 2
    assert said in err
