# SPDX-License-Identifier: Apache-2.0
"""The run of a torchtune configuration, as a plan sees it, and a plan's changes in it."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.dialects.registry import named
from skill_tools.dialects.run import ActivationEngine, Mode, OptimizerEngine, TrainingRun
from skill_tools.planning.model.known_models import shape

DISTRIBUTED = """\
# tune run --nproc_per_node 8 full_finetune_distributed --config x
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
optimizer: {_component_: torch.optim.AdamW, fused: True}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: bf16
batch_size: 2
gradient_accumulation_steps: 4
enable_activation_checkpointing: True
enable_activation_offloading: True
fsdp_cpu_offload: True
"""
SINGLE = DISTRIBUTED.replace("--nproc_per_node 8 full_finetune_distributed", "full_finetune_single_device")


def planned(text: str, gpus: int | None = None) -> tuple[Config, TrainingRun, Mode]:
    config = read_text(text, "config.yaml")
    run = named("torchtune").run(config, shape("llama-3-8b"), gpus=gpus)
    return config, run, named("torchtune").current(config, run)


def labels(text: str) -> list[str]:
    config, run, _ = planned(text)
    return [each.label for each in named("torchtune").candidates(config, run, None)]  # type: ignore[arg-type]


def test_a_distributed_recipe_shards_and_offloads() -> None:
    _, run, mode = planned(DISTRIBUTED)
    assert (run.layout.gpus, run.weight_shards, run.seq_length, run.micro_batch, run.micro_batches) == (
        8,
        8,
        4096,
        2,
        4,
    )
    assert mode.offload_parameters
    assert mode.activation_engine is ActivationEngine.INPUTS
    assert (run.precision.weight_bytes, run.precision.master_bytes, run.precision.moments_bytes) == (2, 0, 4)


def test_a_single_device_recipe_does_neither_whatever_the_key_says() -> None:
    _, run, mode = planned(SINGLE)
    assert (run.layout.gpus, run.weight_shards, mode.offload_parameters) == (1, 1, False)


@pytest.mark.parametrize(
    ("component", "engine", "moments"),
    [
        ("torchao.optim.CPUOffloadOptimizer", OptimizerEngine.TORCHAO, 4.0),
        (
            "torchao.optim.CPUOffloadOptimizer, offload_gradients: True",
            OptimizerEngine.TORCHAO_GRADIENTS,
            4.0,
        ),
        ("bitsandbytes.optim.PagedAdamW8bit", None, 2.0),
    ],
)
def test_the_optimizer_decides_where_states_are(
    component: str, engine: OptimizerEngine | None, moments: float
) -> None:
    _, run, mode = planned(SINGLE.replace("torch.optim.AdamW, fused: True", component))
    assert mode.optimizer_fraction == (1.0 if engine else 0.0)
    assert engine is None or mode.optimizer_engine is engine
    assert run.precision.moments_bytes == moments


def test_adapters_are_read_from_the_builder() -> None:
    _, run, _ = planned(SINGLE.replace("3_1.llama3_1_8b", "3_1.qlora_llama3_1_8b, lora_rank: 16"))
    assert run.adapter is not None
    assert (run.adapter.rank, run.adapter.base_weight_bytes) == (16, 0.53)


def test_each_recipe_is_offered_what_it_has() -> None:
    assert any("FSDP CPU offload" in label for label in labels(DISTRIBUTED))
    assert not any("FSDP" in label for label in labels(SINGLE))
    assert any("CPUOffloadOptimizer" in label for label in labels(SINGLE))
