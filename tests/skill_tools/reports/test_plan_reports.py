# SPDX-License-Identifier: Apache-2.0
"""A plan's words to people, where they could promise another run than its numbers."""

import re
from pathlib import Path

import pytest

from skill_tools.__main__ import main

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear "
    "--vocab-size 128256 --normalization RMSNorm --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--global-batch-size 64 --transformer-impl transformer_engine "
    "--use-distributed-optimizer"
)
RELEASE = ("--target", "megatron-core==0.18.2", "--gpu", "h100", "--gpu-memory", "140GiB")
RECOMPUTE = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def script_plan(script: str, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the plan of a launch script as text."""
    path = folder / "run.sh"
    path.write_text(script, encoding="utf-8")
    code = main(["plan", str(path), *RELEASE, *arguments, "--details"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_a_loop_that_fits_as_it_is_has_nothing_to_carry_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "llama-3.2-1b", "--gpu", "h100"])
    out = capsys.readouterr().out
    assert "nothing to change" in out
    assert "apply_plan" not in out


def test_a_loop_that_offloads_is_told_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "llama-3-8b", "--gpu", "h200", "--gpu-memory", "80GiB"])
    out = capsys.readouterr().out
    assert "apply_plan" in out
    assert "nothing to change" not in out


def test_a_tiny_model_has_figures_too(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "num_layers=8 hidden_size=256 ffn_hidden_size=1024 num_attention_heads=4 vocab_size=512"
    words = ("--framework", "pytorch", "--gpu", "h100", "--tensor-memory", "25MB")
    assert main(["plan", *words, "--overrides", *sizes.split(), "seq_length=128", "lora_rank=8"]) == 0
    out = capsys.readouterr().out
    assert "(6.4e6 parameters) on 1 x h100 of 23.8 MiB (25.0 MB)" in out
    assert not re.search(r"\b0(\.0)?(e9| ms| GiB)", out)


def test_details_say_what_parking_frees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "llama-3-8b", "--gpu", "h200", "--details"])
    whole = capsys.readouterr().out
    main(["plan", "--model", "llama-3-8b", "--gpu", "h200", "--gpu-memory", "80GiB", "--details"])
    offloaded = capsys.readouterr().out
    freed = [
        float(re.search(r"parked between two steps.*\n  ([\d.]+) GiB leave each GPU", out)[1])  # type: ignore[index]
        for out in (whole, offloaded)
    ]
    # GRPO with vLLM on the same GPU: it has parking's bytes, and nothing else changes.
    for out, freed_gib in zip((whole, offloaded), freed, strict=True):
        sizes = re.search(
            r"an engine in this process has ([\d.]+) GiB .* meanwhile, at most (-?[\d.]+) GiB", out
        )
        assert sizes
        assert float(sizes[1]) - float(sizes[2]) == pytest.approx(freed_gib, abs=0.15)
    # bf16 weights with states, and their part that an offloading plan leaves on the GPU.
    assert 2 * 8.03e9 / 2**30 <= freed[1] < freed[0] < 16.1 * 8.03e9 / 2**30
    assert "parked between" not in script_plan(SCRIPT, tmp_path, capsys)


def test_every_error_of_the_run_as_it_is_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = " --cpu-offloading --cpu-offloading-num-layers 32 --offload-optimizer-states"
    out = script_plan(SCRIPT + flags, tmp_path, capsys)
    main(["lint", str(tmp_path / "run.sh"), *RELEASE[:2]])
    errors = capsys.readouterr().out.count(" error ")
    assert errors > 1
    assert f"breaks la-num-layers-range +{errors - 1} more" in out


def test_a_dead_flag_alone_is_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to change" in script_plan(SCRIPT, tmp_path, capsys)
    out = script_plan(f"{SCRIPT} --cpu-offloading", tmp_path, capsys)
    assert "remove --cpu-offloading\n" in out
    assert "nothing to change" not in out


def test_what_full_recompute_keeps_of_a_layer_has_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = script_plan(SCRIPT + RECOMPUTE, tmp_path, capsys, "--gpu-memory", "55GiB")
    assert "recompute full; one layer: layer inputs 0.06 GiB" in out
