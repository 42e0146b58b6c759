# SPDX-License-Identifier: Apache-2.0
"""Plans for several GPUs, carried out on a model that FSDP2 has sharded over two processes."""

import json
from pathlib import Path
from typing import Any

import planned_ranks
import pytest
from rank_processes import run_ranks

from reference_impl.verification.plan_document import execute_section
from skill_tools.__main__ import main

# The sizes of `DecoderShape`.
DECODER = (
    "num_layers=4 hidden_size=64 ffn_hidden_size=176 num_attention_heads=4 vocab_size=512 gated_linear_unit=true "
    "share_embeddings_and_output_weights=false seq_length=32 micro_batch_size=2"
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--framework", "pytorch", "--format", "json", "--gpu", "h100", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


MUON_STREAMS = ("--gpus", "2", "--model", "llama-3-8b", "--gpu-memory", "40GiB")
MUON_OFF = ("--gpus", "2", "--gpu", "4090", "--model", "llama-3-8b", "--host-memory", "256GiB")


@pytest.mark.slow
def test_a_plan_for_two_ranks_trains_as_fsdp2_does_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States on the CPU in part; streamed in part, inputs on the host; everything off; replicas; Muon with both."""
    small = planned(capsys, "--gpus", "2", "--tensor-memory", "2MB", "--overrides", DECODER)
    assert 0 < small["execute"]["optimizer"]["split"]["cpu"] < 1
    words = (
        "--gpus",
        "2",
        "--model",
        "llama-3-8b",
        "--gpu-memory",
        "48GiB",
        "--overrides",
        "seq_length=8192",
    )
    large = planned(capsys, *words)
    assert 0 < large["execute"]["optimizer"]["split"]["streamed"] < 1
    assert large["execute"]["activations"] == {"mode": "recompute"}
    large["execute"]["activations"]["mode"] = "checkpoint"
    words = ("--gpus", "2", "--gpu", "4090", "--model", "llama-3-8b", "--host-memory", "128GiB")
    off = planned(capsys, *words)
    assert off["execute"]["streamed_shards"] == {"streamed_states": "exact"}
    whole = ("--gpus", "2", "--model", "llama-3-8b", "--overrides", "sharding=replicas")
    replicas = planned(capsys, *whole)
    assert replicas["execute"]["optimizer"]["split"]["cpu"] > 0
    of_muon = [planned(capsys, *words, "--overrides", "optimizer=muon") for words in (MUON_STREAMS, MUON_OFF)]
    assert of_muon[0]["execute"]["optimizer"]["offload_fraction"] > 0
    assert of_muon[1]["execute"]["streamed_shards"] == {"formula": "muon", "streamed_states": "exact"}
    paths = []
    for number, document in enumerate([small, large, off, replicas, *of_muon]):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(document), encoding="utf-8")
    run_ranks(planned_ranks.__file__, 2, str(tmp_path / "store"), *map(str, paths))


def test_everything_off_stands_beside_no_other_optimizer() -> None:
    sharding = {"engine": "fsdp2", "ranks": 2, "weights": "float32"}
    wrong: list[dict[str, Any]] = [{}, {"sharding": sharding, "optimizer": {"offload_fraction": 1.0}}]
    for beside in wrong:
        with pytest.raises(ValueError, match="streamed_shards with sharding"):
            execute_section({"execute": {"streamed_shards": {}} | beside})


@pytest.mark.parametrize(
    ("sharding", "named"),
    [
        ({"engine": "fsdp1", "ranks": 2, "weights": "float32"}, "fsdp1"),
        ({"engine": "fsdp2", "ranks": "two", "weights": "float32"}, "two"),
        ({"engine": "fsdp2", "ranks": 2, "weights": "int8"}, "int8"),
        ({"engine": "fsdp2", "ranks": 2}, "weights is missing"),
    ],
)
def test_a_section_that_the_schema_does_not_allow_is_refused(sharding: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        execute_section({"execute": {"sharding": sharding}})
