# SPDX-License-Identifier: Apache-2.0
"""A plan's facts from a Trainer's arguments: sharded weights, offloaded tensors, recomputed layers."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.dialects.run import ActivationEngine
from skill_tools.dialects.sharding import Sharding
from skill_tools.dialects.transformers.candidates import candidates
from skill_tools.dialects.transformers.run import build, checkpoints, current, sharding_of
from skill_tools.planning.model.shape_sources import shape_of

ZERO3 = """\
deepspeed:
  zero_optimization:
    stage: 3
    offload_param: {device: cpu}
    offload_optimizer: {device: cpu}
"""


def config_of(text: str) -> Config:
    recipe = "model_name_or_path: Qwen/Qwen3-8B\noutput_dir: out\nper_device_train_batch_size: 2\n"
    return read_text(recipe + text, "config.yaml", framework="transformers")


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("", Sharding()),
        ("fsdp: true\n", Sharding(3)),
        ("fsdp: shard_grad_op offload\n", Sharding(2)),
        (
            "fsdp: true\nfsdp_config: {cpu_offload: true, reshard_after_forward: false}\n",
            Sharding(2),
        ),
        (ZERO3, Sharding(3, True)),
        ("deepspeed: configs/ds_zero2.json\n", Sharding(2, True)),
    ],
)
def test_sharding_comes_from_fsdp_or_deepspeed(text: str, sharding: Sharding) -> None:
    assert sharding_of(config_of(text)) == sharding


@pytest.mark.parametrize(
    ("text", "recomputes"),
    [
        ("", False),
        ("gradient_checkpointing: true\n", True),
        ("gradient_checkpointing: true\nactivation_checkpointing: false\n", False),
        ("fsdp: true\nfsdp_config: {activation_checkpointing: true}\n", True),
    ],
)
def test_checkpointing_has_three_switches(text: str, recomputes: bool) -> None:
    assert checkpoints(config_of(text)) is recomputes


def test_a_run_and_its_candidates_speak_the_trainers_keys() -> None:
    config = config_of(
        "fsdp: true\nfsdp_config: {version: 2}\nuse_peft: true\nload_in_4bit: true\nmax_length: 512\n"
        "activation_checkpointing: true\nactivation_checkpointing_kwargs: {offload: true}\n"
    )
    run = build(config, shape_of(config, model=None, config_json=None)[0], gpus=4)
    assert (run.tokens, run.weight_shards, run.adapter is not None) == (1024, 4, True)
    assert current(config, run).activation_engine is ActivationEngine.INPUTS
    settings = {key for each in candidates(config, run, None) for key in each.settings}  # type: ignore[arg-type]
    assert {"fsdp_config.cpu_offload", "activation_checkpointing"} <= settings
