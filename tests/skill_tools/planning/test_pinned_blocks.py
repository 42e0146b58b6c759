# SPDX-License-Identifier: Apache-2.0
"""Host bytes of peers, and the empty part of their pinned blocks, by arithmetic."""

import pytest

from skill_tools.dialects import parameters
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import Adapter, Mode, OptimizerEngine, Precision, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.model import known_models, memory, pinned_blocks

MIB = 1 << 20
# A llama-3-8b's tensors in MiB of bf16: queries and output 32, keys and values 8, MLP 112, embedding and head 1002.
LAYER_EMPTY_MIB = 3 * (128 - 112)
ENDS_EMPTY_MIB = 2 * (1024 - 1002)


def run_of(model="llama-3-8b", gpus=1, *, shards=1, precision=None, adapter=None, **options):
    return TrainingRun(
        dialect="transformers",
        shape=known_models.shape(model),
        layout=Layout(gpus=gpus),
        seq_length=2048,
        precision=precision or Precision(2, 2, 0, 4, gradient_is_buffer=False),
        weight_shards=shards,
        gradient_shards=shards,
        is_eager=True,
        adapter=adapter,
        **options,
    )


def host_of(run, mode):
    found = memory.estimate(run, mode)
    return {line.name: line.bytes for line in found.host}, found


DEEPSPEED = Mode(optimizer_fraction=1.0, optimizer_engine=OptimizerEngine.CPU_ADAM)


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 1), (2, 2), (3, 4), (112 * MIB, 128 * MIB), (128 * MIB, 128 * MIB), (2**31 + 1, 2**32)],
)
def test_a_block_has_the_next_power_of_two_of_bytes(size, block):
    assert pinned_blocks.rounded(size) == block


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-30b-a3b", "llama-3.2-1b", "deepseek-v3"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_tensors_are_the_model(model, fused):
    shape = known_models.shape(model)
    counted = sum(
        numel * count
        for found in (
            pinned_blocks.dense_tensors(shape, fused=fused),
            pinned_blocks.expert_tensors(shape, fused=fused),
        )
        for numel, count in found.items()
    )
    assert counted == pytest.approx(parameters.model(shape).total, rel=1e-4)


def test_fsdp2_rounds_weights_and_gradients_tensor_by_tensor():
    host, found = host_of(run_of(), Mode(offload_parameters=True))
    empty = 2 * (32 * LAYER_EMPTY_MIB + ENDS_EMPTY_MIB) * MIB
    assert host["rounding of pinned blocks"] == pytest.approx(empty, rel=1e-3)
    assert found.pinned_bytes == host["weights"] + host["gradients"] + host["rounding of pinned blocks"]
    assert "moments" in host


def test_shards_round_as_the_tensors_do_where_the_ranks_are_a_power_of_two():
    one, _ = host_of(run_of(), Mode(offload_parameters=True))
    eight, _ = host_of(run_of(gpus=8, shards=8), Mode(offload_parameters=True))
    assert eight["rounding of pinned blocks"] * 8 == pytest.approx(one["rounding of pinned blocks"], rel=1e-3)


def test_frozen_weights_are_rounded_at_their_packed_size():
    shape = known_models.shape("llama-3-8b")
    adapter = Adapter(rank=16, parameters=parameters.lora(shape, 16), base_weight_bytes=0.5)
    host, _ = host_of(run_of(gpus=2, shards=2, adapter=adapter), Mode(offload_parameters=True))
    empty = (32 * LAYER_EMPTY_MIB + ENDS_EMPTY_MIB) * MIB // 4 // 2
    assert host["rounding of pinned blocks"] == pytest.approx(empty, rel=1e-3)


def test_deepspeed_keeps_18_bytes_a_parameter():
    """Masters 4, their gradients 4, moments 8, and 2 of the gradients as they arrive."""
    run = run_of(gpus=8, shards=8)
    shard = memory.estimate(run).parameters.shard
    host, found = host_of(run, DEEPSPEED)
    assert host == {"optimizer state": 18 * shard}
    assert found.pinned_bytes == 0


def test_deepspeed_accumulates_in_a_buffer_of_its_own_where_weights_are_not_sharded():
    run = run_of(gpus=8, micro_batches=4)
    shard = memory.estimate(run).parameters.shard
    assert host_of(run, DEEPSPEED)[0] == {"optimizer state": 20 * shard}
    sharded = run_of(gpus=8, shards=8, micro_batches=4)
    assert host_of(sharded, DEEPSPEED)[0] == {"optimizer state": 18 * shard}


def test_zero_3_with_its_parameters_on_the_host_keeps_20_bytes():
    run = run_of(gpus=8, shards=8)
    mode = Mode(offload_parameters=True, optimizer_engine=OptimizerEngine.CPU_ADAM)
    host, _ = host_of(run, mode)
    shard = memory.estimate(run).parameters.shard
    assert host["optimizer state"] == 18 * shard
    assert host["weights"] == pytest.approx(2 * shard, rel=1e-6)
    assert set(host) == {"optimizer state", "weights"}


def test_pinned_flat_buffers_are_rounded_as_one_block_each():
    """With `pin_memory`: 2 B an element in one block, and 4 B in blocks of 1e9 elements, DeepSpeed's sub-group."""
    run = run_of(gpus=2, shards=2)
    shard = memory.estimate(run).parameters.shard
    whole, rest = divmod(shard, 10**9)
    blocks = pinned_blocks.rounded(2 * shard) + whole * 2**32 + pinned_blocks.rounded(4 * rest)
    host, found = host_of(run, DEEPSPEED._replace(pins=True))
    assert host["rounding of pinned blocks"] == pytest.approx(blocks - 6 * shard, rel=1e-6)
    assert found.pinned_bytes == pytest.approx(blocks, rel=1e-6)


def test_pinned_weights_on_the_host_are_one_block_too():
    run = run_of(gpus=2, shards=2)
    shard = memory.estimate(run).parameters.shard
    weights = Mode(offload_parameters=True, optimizer_engine=OptimizerEngine.CPU_ADAM, pins=True)
    with_weights, without = host_of(run, weights)[0], host_of(run, DEEPSPEED._replace(pins=True))[0]
    empty = with_weights["rounding of pinned blocks"] - without["rounding of pinned blocks"]
    assert empty == pytest.approx(pinned_blocks.rounded(2 * shard) - 2 * shard, rel=1e-6)


@pytest.mark.parametrize("engine", [OptimizerEngine.TORCHAO, OptimizerEngine.TORCHAO_GRADIENTS])
def test_torchao_keeps_8_bytes_of_which_4_are_pinned(engine):
    run = run_of()
    host, found = host_of(run, Mode(optimizer_fraction=1.0, optimizer_engine=engine))
    elements = memory.estimate(run).parameters.shard
    empty = 2 * (32 * LAYER_EMPTY_MIB + ENDS_EMPTY_MIB) * MIB
    assert host["optimizer state"] == 8 * elements
    assert host["rounding of pinned blocks"] == pytest.approx(empty, rel=1e-3)
    assert found.pinned_bytes == pytest.approx(4 * elements + empty, rel=1e-3)


def test_megatron_keeps_16_bytes_of_which_8_are_pinned_by_fused_tensors():
    """In fp32: queries, keys and values 96 MiB in 128, the MLP's first 448 in 512, its second 224 in 256."""
    run = TrainingRun(
        dialect="megatron-lm", shape=known_models.shape("llama-3-8b"), layout=Layout(), seq_length=2048
    )
    host, found = host_of(run, Mode(optimizer_fraction=1.0))
    elements = memory.estimate(run).parameters.shard
    empty = 2 * (32 * (32 + 64 + 32) + 2 * (2048 - 2004)) * MIB
    assert host["optimizer state"] == 16 * elements
    assert host["rounding of pinned blocks"] == pytest.approx(empty, rel=1e-3)
    assert found.pinned_bytes == pytest.approx(8 * elements + empty, rel=1e-3)


def test_our_own_memory_is_not_rounded():
    host, _ = host_of(run_of(), Mode(optimizer_fraction=1.0, optimizer_engine=OptimizerEngine.REFERENCE))
    assert set(host) == {"optimizer state"}


def test_sizes_that_are_powers_of_two_leave_nothing_empty():
    shape = ModelShape("even", 2, 1024, 4096, 8, 8, 32768)
    run = run_of()._replace(shape=shape)
    host, _ = host_of(run, Mode(offload_parameters=True))
    assert "rounding of pinned blocks" not in host
