# SPDX-License-Identifier: Apache-2.0
"""miles's commands: slime's options with miles's answers, and state on disk."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.rules.lint import lint

START = "python3 /root/miles/train.py --hf-checkpoint a --actor-num-nodes 1 --rollout-batch-size 32"
MODEL = (
    "--num-layers 36 --hidden-size 2560 --num-attention-heads 32 --ffn-hidden-size 9728 --vocab-size 151936 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --untie-embeddings-and-output-weights"
)


def miles(options: str) -> Config:
    return read_text(f"{START} {options}\n", "run.sh")


def found(options: str) -> set[str]:
    return {finding.rule for finding in lint(miles(options)).findings if finding.severity != "info"}


def test_the_optimizer_is_distributed_for_adam_and_nobody_is_told_otherwise() -> None:
    assert "use_distributed_optimizer" in miles("--colocate").maybe_set
    assert (miles("--colocate").value("bf16"), miles("--fp16").value("bf16")) == (True, None)


def test_a_trainer_that_stays_has_nothing_on_disk() -> None:
    assert found("--colocate --offload-train-target disk") == set()
    assert found("--offload-train-target disk") == {"mi-disk-target"}
    assert found("--offload-train-target disk --advantage-estimator ppo") == set()
    assert "mi-disk-target" in found("--colocate --no-offload-train --offload-train-target disk")
    assert found("--colocate --offload --no-offload-train --offload-train-target disk") == set()


def test_states_stream_where_the_trainer_goes_to_disk_or_stays() -> None:
    assert found("--stream-optimizer-state-to-disk") == set()
    assert found("--colocate --stream-optimizer-state-to-disk") == {"mi-stream-target"}
    assert found("--colocate --stream-optimizer-state-to-disk --offload-train-target disk") == set()


def test_a_fault_tolerant_trainer_is_in_replicas() -> None:
    streamed = "--stream-optimizer-state-to-disk --use-fault-tolerance"
    assert found(f"{streamed} --ft-components rollout train") == {"mi-stream-replicas"}
    assert found(f"{streamed} --ft-components rollout") == set()
    assert found("--stream-optimizer-state-to-disk --ft-components train") == set()


def test_a_plan_is_that_of_megatron_on_the_trainers_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{START} --actor-num-gpus-per-node 4 --colocate --max-tokens-per-gpu 8192 {MODEL}\n")
    assert main(["plan", str(script), "--gpu", "h200", "--details"]) == 0
    said = capsys.readouterr().out
    assert "on 4 x h200" in said
    assert "SGLang's weights and KV cache leave these GPUs" in said


def test_unread_words_behind_a_switch_or_a_value_are_more_options() -> None:
    read = miles("--colocate ${MODEL_ARGS[@]} --tensor-model-parallel-size 4 $MORE --num-layers $LAYERS")
    assert read.value("slime.colocate") is True
    assert read.value("tensor_model_parallel_size") == 4
    assert "num_layers" in read.unresolved
    assert "offload_modules" in miles("--offload-modules core_attn $MORE").unresolved
