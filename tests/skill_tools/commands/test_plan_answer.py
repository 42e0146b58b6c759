# SPDX-License-Identifier: Apache-2.0
"""The answer of `plan`: ten lines if something fits, and three ways to fit otherwise."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.commands import plan_request
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.planning.search import decisive

MEGATRON_LM = """\
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear \\
  --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 2 --global-batch-size 64 --bf16 \\
  --transformer-impl transformer_engine --use-distributed-optimizer
"""
BRIDGE = """\
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, seq_length: 8192, sequence_parallel: true}
train: {global_batch_size: 64, micro_batch_size: 4}
"""
AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
adapter: lora
lora_r: 32
lora_target_linear: true
sequence_len: 8192
micro_batch_size: 8
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
learning_rate: 0.0002
bf16: true
gradient_checkpointing: true
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
"""
IMPORTED = """\
from megatron.bridge.perf_recipes.qwen import qwen3_30b_a3b_pretrain_base


def my_config():
    cfg = qwen3_30b_a3b_pretrain_base()
    cfg.model.pipeline_model_parallel_size = 1
    return cfg
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
dataset: identity
template: llama3
cutoff_len: 4096
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
output_dir: saves
"""
TRAINER = """\
model_name_or_path: meta-llama/Llama-3.1-8B
output_dir: out
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
use_peft: true
gradient_checkpointing: true
max_length: 8192
bf16: true
"""
UNFIT = {
    "run.sh": (MEGATRON_LM, ("--gpu", "h100", "--gpu-memory", "24GB")),
    "bridge.yaml": (
        BRIDGE,
        ("--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--gpu-memory", "24GB"),
    ),
    "axolotl.yaml": (AXOLOTL, ("--gpu", "rtx4090")),
    "llama_factory.yaml": (LLAMA_FACTORY, ("--gpu", "l40s")),
    "trainer.yaml": (TRAINER, ("--gpu", "rtx4090")),
}


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("run.sh", MEGATRON_LM, ("--gpu", "h100")),
        (
            "bridge.yaml",
            BRIDGE,
            ("--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--gpu-memory", "48GB"),
        ),
        (
            "axolotl.yaml",
            AXOLOTL.replace("_size: 8", "_size: 1"),
            ("--gpu", "A100-40GB", "--gpu-memory", "34GB"),
        ),
        ("", "", ("--model", "llama-3-8b", "--gpu", "h100", "--gpu-memory", "40GB")),
    ],
)
def test_the_answer_is_ten_lines_and_leaves_headroom(
    name: str, text: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    if name:
        (tmp_path / name).write_text(text, encoding="utf-8")
        files = [str(tmp_path / name)]
    assert main(["plan", *files, *arguments]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 10
    assert "does not fit as it is: " in out
    assert "fits with " in out
    gpu = next(line for line in out.splitlines() if line.startswith("GPU: "))
    assert "GB)" in gpu
    assert "less than the run as it is" in gpu
    assert "--details" in out.splitlines()[-1]
    assert main(["plan", *files, *arguments, "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert_follows(plan, "plan")
    taken = plan["recommendation"]["option"]["memory"]["device_bytes"]
    assert taken <= 0.95 * plan["budget"]["gpu_bytes"]


def test_the_layout_of_an_imported_recipe_is_said_to_be_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.py").write_text(IMPORTED, encoding="utf-8")
    main(["plan", str(tmp_path / "recipe.py"), "--gpu", "h100", "--gpus", "16"])
    assert "rests most on: TP and EP 1: not set here, a recipe may set it" in capsys.readouterr().out


def ways(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    text, arguments = UNFIT[name]
    (folder / name).write_text(text, encoding="utf-8")
    assert main(["plan", str(folder / name), *arguments, "--format", "json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    plan = json.loads(captured.out)
    assert_follows(plan, "plan")
    assert plan["errors"][0]["kind"] == "nothing-fits"
    found: list[dict[str, Any]] = plan["ways"]
    return found


@pytest.mark.parametrize("name", UNFIT)
def test_where_nothing_fits_three_ways_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ways(name, tmp_path, capsys)
    assert len(found) == 3
    for way in found:
        assert way["option"]["fits"]
        assert way["patch"]["text"] or way["patch"]["overrides"] or way["changes"][0]["gpus"]


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama_factory.yaml", "trainer.yaml"])
def test_a_way_s_lines_make_the_run_fit_and_lint_without_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, arguments = UNFIT[name]
    for way in ways(name, tmp_path, capsys):
        changed = way["patch"]["text"]
        keys = [line.split(":")[0] for line in changed.splitlines()]
        kept = [line for line in text.splitlines() if line.split(":")[0] not in keys]
        path = tmp_path / f"changed_{name}"
        path.write_text("\n".join([*kept, changed]), encoding="utf-8")
        gpus = [each["gpus"] for each in way["changes"] if each["gpus"]]
        more = ["--gpus", str(gpus[0])] if gpus else []
        assert main(["lint", str(path), "--fail-on", "error"]) == 0, capsys.readouterr().out
        assert main(["plan", str(path), *arguments, *more]) == 0
        assert "fits as it is" in capsys.readouterr().out


def test_a_plain_loop_is_told_what_to_change_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "llama-3-8b", "--gpu-memory", "20GiB", "--overrides", "micro_batch_size=8"])
        == 2
    )
    out, err = capsys.readouterr()
    assert "nothing fits: the least takes " in out
    assert "in the loop: micro-batch " in out
    assert "at least" in err


def test_more_host_memory_is_a_way_where_it_is_what_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--gpu", "h100", "--gpu-memory", "40GB", "--host-memory", "20GB"]
    assert main(["plan", "--model", "llama-3-8b", *budgets]) == 2
    assert "of host memory a node (--host-memory)" in capsys.readouterr().out


LOOP = ("--framework", "pytorch", "--host-memory", "160GB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--model llama-3.2-1b --gpu h100 --overrides recompute_granularity=full",
            "fits with no recomputation:\ntake checkpointing out of the loop\nGPU:",
        ),
        ("--model llama-3.2-1b --gpu h100", "fits as it is: nothing to change\nGPU:"),
        (
            "--model llama-3-8b --gpus 8 --gpu rtx4090 --overrides recompute_granularity=full",
            "fits as it is: nothing to change\n  torchrun",
        ),
        (
            "--model llama-3-8b --gpu rtx4090 --overrides recompute_granularity=full",
            "states resident:\ntake checkpointing out of the loop\nto carry it out, save it",
        ),
        (
            "--model llama-3-8b --gpu h100 --gpu-memory 12GiB --overrides lora_rank=16",
            "step applied.optimizer\na model that is larger than the GPU stays on the CPU: apply_plan(",
        ),
        (
            "--model llama-3.2-3b --gpu rtx4090 --only optimizer",
            "split=(0.14, 0.86, 0)) for AdamW; then its attach(model)\nGPU:",
        ),
    ],
)
def test_a_loop_is_told_in_words_what_to_do(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *LOOP, *words.split()]) == 0
    assert said in capsys.readouterr().out


def test_rows_say_whose_checkpointing_it_is_and_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "accelerate.yaml"
    run.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    )
    main(["plan", str(run), "--model", "llama-3-8b", "--gpu", "rtx4090", "--details"])
    said = capsys.readouterr().out
    assert "\n  FSDP's activation checkpointing + FSDP parameter offload " in said
    assert "\n  no recomputation " in said


def test_it_rests_on_what_changes_it_most_whatever_the_sentences_say() -> None:
    parser = argparse.ArgumentParser()
    plan_request.add_arguments(parser)
    plan = plan_request.make_plan(parser.parse_args(["--model", "llama-3-8b", "--gpu", "h100"]), [])
    weighty = [about for about in About if about is not About.DETAIL]
    said = [Assumption(about.name, about, f"about {about.name}") for about in reversed(About)]
    for about in weighty:
        found = decisive.assumption(plan._replace(assumptions=tuple(said), recommendation=None))
        assert found == f"{about.name}; about {about.name}"
        said = [each for each in said if each.about is not about]
    assert "rates" in decisive.assumption(plan._replace(assumptions=tuple(said)))
    # The host's memory is nothing to a plan that takes none of it.
    best = plan.without_offload
    host = (Assumption("host", About.HOST_MEMORY),)
    assert best.memory.host_bytes_per_node == 0
    assert "host" not in decisive.assumption(plan._replace(assumptions=host, recommendation=best))


def test_where_the_hosts_memory_stops_it_the_answer_rests_on_whose_that_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "rtx3060"]) == 2
    assert "rests most on: host memory: 62.0 GiB a node" in capsys.readouterr().out
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "rtx3060", "--host-memory", "62GiB"]) == 2
    assert "rests most on: sequence length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "has_bf16"), [("t4", False), ("V100", False), ("2080ti", False), ("a10g", True)]
)
def test_a_gpu_without_bf16_is_said_to_train_in_fp16(
    gpu: str, has_bf16: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--framework", "pytorch", "--model", "qwen3-0.6b", "--gpu", gpu, "--host-memory", "64GB"]
    main(["plan", *words, "--overrides", "seq_length=2048", "micro_batch_size=1"])
    assert ("has no bf16" in capsys.readouterr().out) is not has_bf16


def test_a_host_that_nobody_stated_is_said_in_the_first_lines_of_a_plan_that_takes_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def first_lines(*words: str) -> str:
        main(
            ["plan", "--framework", "pytorch", *words, "--overrides", "seq_length=2048", "micro_batch_size=1"]
        )
        return "\n".join(capsys.readouterr().out.splitlines()[:2])

    said = "no host memory is stated: 62.0 GiB a node is assumed"
    assert said in first_lines("--model", "llama-3.2-3b", "--gpu", "rtx4090")
    assert "is stated" not in first_lines(
        "--model", "llama-3.2-3b", "--gpu", "rtx4090", "--host-memory", "64GB"
    )
    takes_none = first_lines("--model", "qwen3-0.6b", "--gpu", "rtx4090")
    assert "fits as it is" in takes_none
    assert "is stated" not in takes_none


@pytest.mark.parametrize(
    ("model", "gpu", "host"),
    [
        ("llama-3-8b", "rtx4090", "16GB"),
        ("mistral-7b", "rtx3090", "64GB"),
        ("gemma-2-9b", "a100-40gb", "80GB"),
    ],
)
def test_no_way_to_fit_takes_less_of_the_host_than_the_least(
    model: str, gpu: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--framework", "pytorch", "--model", model, "--gpu", gpu, "--host-memory", host])
    said = capsys.readouterr().out
    least = re.search(r"the least takes ([\d.]+) GiB \([^)]*\) of host memory", said)
    by_host = re.search(r"^1\. .*\(--host-memory\).* a GPU, ([\d.]+) GiB", said, re.MULTILINE)
    assert least
    assert by_host
    assert float(least[1]) <= float(by_host[1])
