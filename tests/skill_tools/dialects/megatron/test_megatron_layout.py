# SPDX-License-Identifier: Apache-2.0
import pytest

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.dialects import layout
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.megatron import layout as megatron_layout
from skill_tools.dialects.megatron import run as megatron_run
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput
from skill_tools.planning.model import known_models
from skill_tools.planning.model.activations import in_flight
from skill_tools.planning.model.shape_sources import from_fields


def config(framework: str = "megatron-lm", **values: object) -> Config:
    settings = {key: Setting(key, value, key, Place("run.sh", 1, 1)) for key, value in values.items()}
    return Config(framework, settings, complete=framework == "megatron-lm")


def test_megatrons_stage_notation_places_every_layer() -> None:
    found = megatron_layout.of_megatron(
        config(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|(tt|)*6mL"),
        gpus=2,
        num_layers=15,
        moe=False,
    )
    assert found.layout.stage_layers == (3, 2, 2, 2, 2, 2, 2, 0)
    assert found.layout.virtual_stages == 4


def test_uneven_first_and_last_stages_are_kept() -> None:
    found = megatron_layout.of_megatron(
        config(
            pipeline_model_parallel_size=4,
            num_layers_in_first_pipeline_stage=5,
            num_layers_in_last_pipeline_stage=7,
        ),
        gpus=4,
        num_layers=32,
        moe=False,
    )
    assert found.layout.stage_layers == (5, 10, 10, 7)


def test_without_a_world_size_the_fewest_gpus_are_assumed_and_said() -> None:
    found = megatron_layout.of_megatron(
        config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=4),
        gpus=None,
        num_layers=48,
        moe=True,
    )
    assert found.layout.gpus == 16  # EP 4 x ETP 2 (Megatron's default is TP) x PP 2
    assert any("16 GPUs" in each.text for each in found.assumptions)


@pytest.mark.parametrize(("gpus", "sizes"), [(6, {"tensor": 4}), (8, {"pipeline": 3}), (4, {"expert": 8})])
def test_a_world_size_that_does_not_divide_is_refused_with_one_that_does(
    gpus: int, sizes: dict[str, int]
) -> None:
    with pytest.raises(UnusableInput, match="do not divide"):
        layout.checked(Layout(gpus=gpus, **sizes))


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UnusableInput, match="does not divide over DP 8"):
        megatron_run.build(config(global_batch_size=12), known_models.shape("llama-3.2-1b"), gpus=8)


@pytest.mark.parametrize(
    ("stages", "chunks", "rank", "batches", "expected"),
    [(1, 1, 0, 8, 1), (4, 1, 0, 8, 4), (4, 1, 3, 8, 1), (4, 1, 0, 2, 2), (4, 2, 0, 8, 11 / 2)],
)
def test_micro_batches_in_flight(stages: int, chunks: int, rank: int, batches: int, expected: float) -> None:
    run = TrainingRun(
        dialect="megatron-lm",
        shape=known_models.shape("llama-3-8b"),
        layout=Layout(gpus=stages, pipeline=stages, virtual_stages=chunks),
        seq_length=4096,
        micro_batches=batches,
    )
    assert in_flight(run, rank) == expected


def test_a_tied_model_keeps_a_second_embedding_on_the_last_stage() -> None:
    shape = known_models.shape("llama-3.2-3b")
    first, last = layout.stages(shape, Layout(gpus=2, pipeline=2))
    assert layout.stage_parameters(shape, last).total > layout.stage_parameters(shape, first).total


def test_moe_layers_by_megatrons_pattern() -> None:
    shape_config = config(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=1000,
        num_moe_experts=8,
        moe_layer_freq="([0]*1+[1]*3)",
    )
    shape = from_fields(shape_config)
    assert isinstance(shape, ModelShape)
    assert [shape.is_moe(index) for index in range(4)] == [False, True, True, True]


def test_a_head_size_of_its_own_needs_no_hidden_size_that_divides() -> None:
    sizes = {"num_layers": 4, "hidden_size": 1000, "num_attention_heads": 16, "vocab_size": 1000}
    with pytest.raises(UnusableInput, match="does not divide into 16 heads"):
        from_fields(config(**sizes))
    shape = from_fields(config(**sizes, kv_channels=64))
    assert shape is not None
    assert shape.attention_head_dim == 64


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("torchrun --nproc_per_node 8 pretrain_gpt.py", 8),
        ("torchrun --nproc-per-node=4 --nnodes=2 pretrain_gpt.py", 8),
        (
            "GPUS_PER_NODE=8\nNNODES=${N:-4}\ntorchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES} x.py",
            32,
        ),
        ("torchrun --nproc_per_node $SET_ELSEWHERE x.py", None),
    ],
)
def test_the_launch_line_says_how_many_gpus(text: str, world: int | None) -> None:
    launched = config(tensor_model_parallel_size=2)._replace(sources={"run.sh": text})
    found = megatron_layout.of_megatron(launched, gpus=None, num_layers=4, moe=False)
    assert found.layout.gpus == (world or 2)


@pytest.mark.parametrize(
    ("values", "moe", "said"),
    [
        ({}, True, "TP, PP and EP 1: not set here, a recipe may set it"),
        ({"tensor_model_parallel_size": 2}, True, "PP and EP 1: not set here, a recipe may set it"),
        ({}, False, "TP and PP 1: not set here, a recipe may set it"),
        (
            {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
            True,
            "EP 1: not set here, a recipe may set it",
        ),
    ],
)
def test_sizes_that_an_unseen_recipe_may_set_are_said(
    values: dict[str, object], moe: bool, said: str
) -> None:
    """A perf recipe that imports its base is no whole configuration: the base's settings are unknown."""
    found = megatron_layout.of_megatron(config("megatron-bridge", **values), gpus=16, num_layers=48, moe=moe)
    assert said in [each.text for each in found.assumptions]


def test_a_size_that_divides_nothing_is_refused_at_once() -> None:
    huge = config(tensor_model_parallel_size=10**12)
    with pytest.raises(UnusableInput, match="expected a divisor of 32; try tensor_model_parallel_size=32"):
        megatron_run.build(huge, known_models.shape("llama-3-8b"), gpus=10**12)


def test_a_pipeline_of_more_chunks_than_anybody_has_is_refused_at_once() -> None:
    shape = known_models.shape("llama-3-8b")
    with pytest.raises(UnusableInput, match="1000000000000 chunks, and llama-3-8b 32 layers; expected 65536"):
        layout.stages(shape, Layout(gpus=10**12, pipeline=10**12))
