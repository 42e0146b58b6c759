# SPDX-License-Identifier: Apache-2.0
"""Every framework's plan searches all its mechanisms, and counts the bytes that its ranks send each other."""

import json
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.dialects import registry
from skill_tools.dialects.candidates import (
    BUDGET,
    FINE_GRAINED,
    INPUTS,
    LAYERS,
    OPTIMIZER,
    RECOMPUTE,
    SHARDED,
    STATES,
    TRAINED,
)
from skill_tools.dialects.read import read
from skill_tools.planning.cost import compute, machine
from skill_tools.planning.model import known_models, memory
from skill_tools.planning.search.candidates import RunAdvice
from skill_tools.planning.search.legality import Judge

ZERO_2 = json.dumps(
    {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
)
AXOLOTL = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 1\ndatasets: [{path: d, type: alpaca}]\n"
LLAMA_FACTORY = (
    "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
    "per_device_train_batch_size: 1\n"
)
TRAINER = (
    "from transformers import Trainer, TrainingArguments\n"
    "args = TrainingArguments('out', per_device_train_batch_size=1, {})\nTrainer(model=m, args=args).train()\n"
)
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nmixed_precision: bf16\ndistributed_type: {}\n"
)
TITAN = (
    '[model]\nname = "qwen3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
    "[parallelism]\ndata_parallel_shard_degree = 8\n"
)
TUNE = (
    "tokenizer:\n  _component_: torchtune.models.qwen2_5.qwen2_5_tokenizer\n  max_seq_len: 2048\n"
    "model:\n  _component_: torchtune.models.qwen2_5.qwen2_5_7b_base\n"
    "optimizer:\n  _component_: torch.optim.AdamW\nbatch_size: 1\n"
    "loss:\n  _component_: torchtune.modules.loss.LinearCrossEntropyLoss\n"
)
SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --colocate --bf16 "
    "--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --use-distributed-optimizer\n"
)
# A file of each framework, and the mechanisms that its plan has to search with it.
SEARCHED: list[tuple[str, str, str, set[str]]] = [
    ("axolotl", "run.yaml", AXOLOTL + "deepspeed: ds.json\n", {RECOMPUTE, INPUTS, OPTIMIZER}),
    ("axolotl", "run.yaml", AXOLOTL + "fsdp_config: {fsdp_version: 2}\n", {RECOMPUTE, INPUTS, SHARDED}),
    ("llama-factory", "run.yaml", LLAMA_FACTORY + "deepspeed: ds.json\n", {RECOMPUTE, INPUTS, OPTIMIZER}),
    ("llama-factory", "run.yaml", LLAMA_FACTORY, {RECOMPUTE, INPUTS}),
    ("transformers", "train.py", TRAINER.format("deepspeed='ds.json'"), {RECOMPUTE, INPUTS, OPTIMIZER}),
    ("transformers", "train.py", TRAINER.format("fsdp='full_shard'"), {RECOMPUTE, INPUTS, SHARDED}),
    (
        "accelerate",
        "acc.yaml",
        ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_version: 2}\n",
        {RECOMPUTE, INPUTS, SHARDED},
    ),
    (
        "accelerate",
        "acc.yaml",
        ACCELERATE.format("DEEPSPEED") + "deepspeed_config: {zero_stage: 3}\n",
        {OPTIMIZER, SHARDED},
    ),
    ("slime", "run.sh", SLIME, {LAYERS, OPTIMIZER, RECOMPUTE}),
    ("miles", "run.sh", f"# miles\n{SLIME}", {LAYERS, OPTIMIZER, RECOMPUTE}),
    ("torchtitan", "titan.toml", TITAN, {RECOMPUTE, SHARDED}),
    ("torchtune", "tune.yaml", TUNE, {RECOMPUTE, INPUTS, STATES}),
    ("torchtune", "tune.yaml", TUNE + "fsdp_cpu_offload: true\n", {RECOMPUTE, INPUTS, SHARDED}),
]
WITHOUT_A_FILE = [
    ("pytorch", {BUDGET, INPUTS, LAYERS, OPTIMIZER, RECOMPUTE, TRAINED}),
    ("megatron-bridge", {FINE_GRAINED, LAYERS, OPTIMIZER, RECOMPUTE, STATES}),
    ("megatron-lm", {FINE_GRAINED, LAYERS, OPTIMIZER, RECOMPUTE, STATES}),
]


@pytest.mark.parametrize(("dialect", "name", "text", "mechanisms"), SEARCHED)
def test_every_mechanism_of_a_framework_is_searched(
    tmp_path: Path, dialect: str, name: str, text: str, mechanisms: set[str]
) -> None:
    (tmp_path / "ds.json").write_text(ZERO_2, encoding="utf-8")
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    config = read([str(path)], overrides=[], framework=None)
    assert config.framework == dialect
    found = registry.named(dialect)
    run = found.run(config, known_models.shape("qwen3-8b"), gpus=8)
    rates = machine.known("h100", ranks_on_node=8)
    speed = compute.pace(run, rates, memory.estimate(run).parameters.shard)
    advice = RunAdvice(run, rates, speed, Judge(config, {}))
    searched = {each for one in found.candidates(config, run, advice) for each in one.mechanisms}
    assert mechanisms <= searched


@pytest.mark.parametrize(("dialect", "mechanisms"), WITHOUT_A_FILE)
def test_frameworks_without_a_file_search_theirs(dialect: str, mechanisms: set[str]) -> None:
    config = read([], overrides=[], framework=dialect)
    found = registry.named(dialect)
    run = found.run(config, known_models.shape("qwen3-8b"), gpus=1)
    rates = machine.known("h100", ranks_on_node=1)
    speed = compute.pace(run, rates, memory.estimate(run).parameters.shard)
    advice = RunAdvice(run, rates, speed, Judge(config, {}))
    searched = {each for one in found.candidates(config, run, advice) for each in one.mechanisms}
    assert mechanisms <= searched


def test_a_framework_without_a_plan_says_why() -> None:
    planned = {name for name, _, _, _ in SEARCHED} | {name for name, _ in WITHOUT_A_FILE}
    others = [name for name in registry.names() if name not in planned | {"deepspeed"}]
    assert [name for name in others if not registry.named(name).no_plan] == []


COLLECTIVES = ("gathers", "reductions", "all-reduce", "updated weights")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for _, name, text, _ in SEARCHED),
        ("run.yaml", AXOLOTL),
        ("acc.yaml", ACCELERATE.format("MULTI_GPU")),
    ],
)
def test_what_ranks_send_is_counted_whoever_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / "ds.json").write_text(ZERO_2, encoding="utf-8")
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")

    def sent_s(gpus: int) -> float:
        main(
            [
                "plan",
                str(path),
                "--model",
                "qwen3-8b",
                "--gpu",
                "h100",
                "--gpus",
                str(gpus),
                "--format",
                "json",
            ]
        )
        costs = json.loads(capsys.readouterr().out)["without_offload"]["time"]["costs"]
        return sum(cost["work_s"] for cost in costs if cost["name"].startswith(COLLECTIVES))

    assert sent_s(8) > 0.02  # 16e9 bytes at 360 GB/s are 45 ms
    assert sent_s(64) > sent_s(8)
