# SPDX-License-Identifier: Apache-2.0
"""The run of a LLaMA-Factory configuration, as a plan sees it."""

import pytest

from skill_tools.dialects.read import read_text
from skill_tools.dialects.registry import named
from skill_tools.dialects.run import ActivationEngine, Mode, TrainingRun
from skill_tools.planning.model.known_models import shape

YAML = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
use_unsloth_gc: true
"""
ZERO = "deepspeed: {train_micro_batch_size_per_gpu: auto, zero_optimization: {stage: %d, offload_%s: {device: cpu}}}\n"


def planned(text: str) -> tuple[TrainingRun, Mode]:
    config, dialect = read_text(text, "config.yaml"), named("llama-factory")
    run = dialect.run(config, shape("qwen3-8b"), gpus=None)
    return run, dialect.current(config, run)


def test_without_deepspeed_it_trains_in_fp32_on_one_gpu() -> None:
    run, mode = planned(YAML)
    assert (run.layout.gpus, run.precision.weight_bytes, run.precision.moments_bytes) == (1, 4, 8)
    assert (run.seq_length, run.micro_batches) == (4096, 8)
    assert mode.activation_engine is ActivationEngine.INPUTS


def test_the_deepspeed_section_says_what_is_sharded_and_offloaded() -> None:
    run, mode = planned(YAML + ZERO % (3, "param"))
    assert (run.weight_shards, mode.offload_parameters) == (8, True)
    run, mode = planned(YAML + ZERO % (2, "optimizer"))
    assert (run.weight_shards, run.gradient_shards, mode.optimizer_fraction) == (1, 8, 1.0)


def test_a_file_that_is_not_here_is_taken_by_its_name() -> None:
    run, _ = planned(YAML + "deepspeed: examples/deepspeed/ds_z3_offload_config.json\n")
    assert run.weight_shards == 8


def test_checkpointing_is_on_unless_it_is_turned_off() -> None:
    run, mode = planned(YAML + "disable_gradient_checkpointing: true\n")
    assert (run.recompute.granularity, mode.activation_engine) == ("none", ActivationEngine.NONE)


def test_adapters_keep_a_quantized_base() -> None:
    run, _ = planned(YAML.replace("full", "lora") + "quantization_bit: 4\nlora_rank: 16\n")
    assert run.adapter is not None
    assert (run.adapter.rank, run.adapter.base_weight_bytes) == (16, 0.53)


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("deepspeed --num_gpus 4 src/train.py", 4),
        ("torchrun --nnodes 2 --nproc_per_node=4 src/train.py", 8),
        ("accelerate launch --num_processes 2 src/train.py", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train", 3),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node 2 src/train.py", 2),
        ("CUDA_VISIBLE_DEVICES=$GPUS llamafactory-cli train", 1),
    ],
)
def test_the_command_says_how_many_gpus_train(command: str, gpus: int) -> None:
    words = "--stage sft --do_train --model_name_or_path Qwen/Qwen3-8B --finetuning_type full --cutoff_len 64"
    config = read_text(f"{command} {words}\n", "run.sh")
    assert named("llama-factory").run(config, shape("qwen3-8b"), gpus=None).layout.gpus == gpus
