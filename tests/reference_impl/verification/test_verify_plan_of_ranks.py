# SPDX-License-Identifier: Apache-2.0
"""`verify --plan` of plans for several GPUs: each rank a process, a CPU twin of its GPU."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bf16_products
import forked
import launched_ranks
import pytest
import torch
from schemas import assert_follows

from reference_impl.device import Device
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.distributed.launch import RankError, launch
from reference_impl.verification.planned_run import PlanError, read_plan
from reference_impl.verification.verify_plan import PlanVerification, verify_plan
from skill_tools.__main__ import main
from skill_tools.dialects.pytorch import candidates

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Plans a tiny model for several GPUs as `offload plan` does, of all its candidates those called `only`."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(*words: str, gpus: int = 2, only: str | None = None, overrides: str = "") -> Path:
        if only is not None:
            offered = candidates.candidates
            monkeypatch.setattr(
                candidates,
                "candidates",
                lambda *asked: (each for each in offered(*asked) if each.label == only),
            )
        capsys.readouterr()
        batch = f"seq_length=64 micro_batch_size=2 {overrides}"
        named = [str(tmp_path / "config.json"), "--gpu", "h200", "--gpus", str(gpus), *words]
        assert main(["plan", *named, "--format", "json", "--overrides", batch]) == 0
        path = tmp_path / "plan.json"
        path.write_text(capsys.readouterr().out)
        return path

    return make


@pytest.fixture(autouse=True)
def ranks_multiply_bf16_as_fast_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(ranks: int, device: Device, work: Any, on_report: Any) -> list[Any]:
        return launch(ranks, device, partial(bf16_products.in_a_rank, work), on_report)

    monkeypatch.setattr("reference_impl.verification.verify_plan.launch", launched)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That spawned ones train the same, the test of the command shows."""
    forked.launches(monkeypatch)


def verified(path: Path, *, most_error: float = 0.1) -> PlanVerification:
    """Train the plan and compare it with no offload, bitwise and within the tolerance of tiny blocks."""
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.max_loss_delta == 0
    ranks = json.loads(path.read_text())["layout"]["gpus"]
    assert len(found.trained.losses) == 6 * ranks
    assert len(set(found.trained.losses)) == 6 * ranks
    for peak, between_steps, _ in found.runs.values():
        # The twin's collectives are over when they return, and its norms keep more than a GPU's.
        assert peak.error is not None
        assert abs(peak.error) < most_error
        assert between_steps.measured <= 1.01 * between_steps.predicted
    return found


def host_error(found: PlanVerification) -> float | None:
    return next(iter(found.runs.values()))[2].error


@pytest.mark.slow
def test_the_command_trains_shards_with_their_states_in_part_on_the_cpu(
    made: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("--tensor-memory", "11.5MB")
    planned = json.loads(path.read_text())["execute"]
    assert 0 < planned["optimizer"]["split"]["cpu"] < 1
    assert main(["verify", "--device", "cpu", "--plan", str(path), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_follows(document, "verify")
    assert document["workload"]["ranks"] == 2
    assert (document["workload"]["sharding"], document["workload"]["shard_dtype"]) == ("fsdp2", "float32")
    assert document["plan"]["max_loss_delta"] == 0
    host = document["plan"]["runs"][0]["quantities"][2]
    assert host["measured"] > 0
    assert host["error"] == pytest.approx(0, abs=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_cannot_carry_the_plan_out_is_one_line(
    made: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("--gpu-memory", "2GiB")
    document = json.loads(path.read_text())
    document["execute"]["sharding"]["ranks"] = 4
    path.write_text(json.dumps(document))
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert "the plan is for sharded over 4 ranks" in error
    assert error.splitlines()[-1].count("expected") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("only", ["", "checkpointing + "])
def test_everything_off_takes_what_the_plan_says(made: Make, only: str) -> None:
    found = verified(made("--gpu-memory", "2GiB", only=f"{only}shards, gradients and states on the host"))
    assert host_error(found) == pytest.approx(0, abs=0.02)


ALL_OFF = "checkpointing + shards, gradients and states on the host"
# Each table is as large as six blocks.
MANY_WORDS = CONFIG | {"vocab_size": 9000}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("only", ["no offload", ALL_OFF])
def test_large_embeddings_and_heads_are_gathered_and_reduced(
    made: Make, tmp_path: Path, only: str, dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MANY_WORDS))
    verified(made(only=only, overrides=f"shard_dtype={dtype}"), most_error=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("only", ["no offload", ALL_OFF])
def test_they_are_so_where_the_model_computes_its_loss(
    made: Make, tmp_path: Path, only: str, is_tied: bool
) -> None:
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(MANY_WORDS | {"tie_word_embeddings": is_tied}))
    profile = tmp_path / "profile.json"
    assert main(["trace", str(tmp_path / "config.json"), "--out", str(profile)]) == 0
    verified(made("--trace", str(profile), only=only), most_error=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("memory", ["28MB", "23MB", "22MB", "20.5MB"])
def test_a_tied_table_that_both_the_gpu_and_the_cpu_update_counts_as_a_whole(
    made: Make, tmp_path: Path, memory: str
) -> None:
    """Of few tokens, so that the most is alive where both gradients of the table meet."""
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(MANY_WORDS | {"tie_word_embeddings": True}))
    profile = tmp_path / "profile.json"
    assert main(["trace", str(tmp_path / "config.json"), "--out", str(profile)]) == 0
    batch = "seq_length=16 micro_batch_size=1"
    verified(made("--trace", str(profile), "--tensor-memory", memory, overrides=batch), most_error=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_copy_that_only_gloo_makes_is_not_counted() -> None:
    assert launch(2, Device.of("cpu"), launched_ranks.reduce_and_scatter) == [({2.0}, 0)] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_bf16_shards_over_four_ranks_accumulate(made: Make) -> None:
    overrides = "gradient_accumulation_steps=2 shard_dtype=bfloat16"
    found = verified(made("--tensor-memory", "8MB", gpus=4, overrides=overrides))
    assert host_error(found) == pytest.approx(0, abs=0.02)
    assert found.planned.workload.describe()["shard_dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replicas_train_as_distributed_data_parallel_does(made: Make, micro_batches: int) -> None:
    overrides = f"sharding=replicas gradient_accumulation_steps={micro_batches}"
    found = verified(made("--tensor-memory", "16MB", overrides=overrides))
    assert host_error(found) == pytest.approx(0, abs=0.02)
    assert found.planned.workload.describe()["sharding"] == "replicas"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_adapters_are_trained_over_a_frozen_model_in_shards(made: Make) -> None:
    # Without gradients and states of the model the norms are a large part.
    found = verified(made("--gpu-memory", "2GiB", overrides="lora_rank=8 hidden_size=128"), most_error=0.12)
    assert found.planned.workload.lora_rank == 8


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("sharding", "rank"), [("fsdp2", 0), ("replicas", 0), ("fsdp2", 8)])
def test_a_traced_model_with_a_tied_table_is_trained(
    made: Make, tmp_path: Path, sharding: str, rank: int
) -> None:
    for library in ("transformers.modeling_utils", *["peft"] * (rank > 0)):
        pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    tied = CONFIG | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(tied))
    profile = tmp_path / "profile.json"
    adapters = ["--lora-rank", str(rank)] * (rank > 0)
    assert main(["trace", str(tmp_path / "config.json"), *adapters, "--out", str(profile)]) == 0
    path = made("--trace", str(profile), "--gpu-memory", "2GiB", overrides=f"sharding={sharding}")
    # A trace has peft's adapters compute in fp32, as on one GPU; FSDP2 gathers them in bf16.
    found = verified(path, most_error=0.3 if rank else 0.1)
    assert found.planned.workload.lora_rank == rank
    # Peft's adapters are in fp32, the frozen weights beside them in bf16.
    between_steps = found.runs["without offload"][1]
    assert between_steps.error == pytest.approx(0, abs=0.01)


class OneGpu(CpuTwin):
    """Says that it is an accelerator, of which there is one."""

    is_accelerator = True


def test_as_many_gpus_as_ranks_are_needed(made: Make) -> None:
    planned = read_plan(made("--gpu-memory", "2GiB", gpus=8))
    with pytest.raises(
        PlanError, match="for 8 GPUs and 1 are here; expected one for each rank; try --device cpu"
    ):
        verify_plan(OneGpu(torch.device("cpu")), planned)


def test_memory_is_needed_for_all_ranks(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Any = read_plan(made("--gpu-memory", "2GiB", gpus=8))
    monkeypatch.setattr("reference_impl.verification.verify_plan.available_bytes", lambda: 2**31)
    with pytest.raises(PlanError, match=r"the plan needs 2\.\d GiB and CPU twin has 2\.0 GiB free"):
        verify_plan(Device.of("cpu"), planned)


def test_a_rank_that_is_gone_is_one_line(
    made: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("--gpu-memory", "2GiB")

    def gone(*_: Any) -> None:
        raise RankError("rank 1 of 2 has ended with exit code -9; expected its result; try fewer ranks")

    monkeypatch.setattr("reference_impl.verification.verify_plan.launch", gone)
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    said = "rank 1 of 2 has ended with exit code -9; expected its result; try a plan for fewer GPUs or a smaller model"
    assert capsys.readouterr().err.splitlines()[-1] == f"offload: {said}"


def test_a_limit_of_this_process_is_refused(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    path = made("--gpu-memory", "2GiB")
    assert main(["verify", "--device", "cpu", "--plan", str(path), "--pinned-memory", "1GB"]) == 2
    assert "try offload plan --pinned-memory" in capsys.readouterr().err
