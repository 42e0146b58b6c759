# SPDX-License-Identifier: Apache-2.0
"""Plans for several GPUs of a plain loop: FSDP2's bytes and seconds, against measured runs and against arithmetic."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.bundle import knowledge_path
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import Mode, OptimizerEngine, Recompute, StreamedStates, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.cost import collectives, compute, machine, optimizer, step_time, time_range
from skill_tools.planning.model import known_models, memory, streamed_states, traces
from skill_tools.planning.search import planner
from skill_tools.planning.search.options import Budget
from skill_tools.units import GIB
from tests.skill_tools.planning.test_plan_properties import config

FULL = Recompute(granularity="full")
NONE = Mode(recompute=FULL)


def offloaded(streamed: float, form: StreamedStates = StreamedStates.EXACT) -> Mode:
    return Mode(
        optimizer_fraction=1.0,
        streamed_fraction=streamed,
        optimizer_engine=OptimizerEngine.REFERENCE,
        recompute=FULL,
        streamed_states=form,
    )


ON_THE_CPU, STREAMED = offloaded(0), offloaded(1)
BF16_MOMENTS = offloaded(1, StreamedStates.PACKED)


def of(model: str | ModelShape, gpus: int, **overrides: object) -> TrainingRun:
    shape = known_models.shape(model) if isinstance(model, str) else model
    return pytorch_run.build(config(**overrides), shape, gpus=gpus)


class Row(NamedTuple):
    """One measured row: GB of 10**9 bytes at the peak of a rank, seconds a step; `slots_gb` held prefetched states."""

    mode: Mode
    sequences: int
    peak_gb: float
    step_s: float | None = None
    slots_gb: float = 0.0


class Measured(NamedTuple):
    """A model and the GPUs on which it was measured, with sequences of 4,096 tokens and a vocabulary of 32,000.

    `loss_bytes` are those of a logit.
    """

    gpu: str
    ranks: int
    shape: ModelShape
    rows: tuple[Row, ...]
    loss_bytes: float = pytorch_run.LOSS_BYTES


def decoder(hidden: int, ffn: int, layers: int, heads: int) -> ModelShape:
    return ModelShape("decoder", layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads, vocab=32000)


# docs/distributed.md, "Measured": seconds are the ratio times the step without offload.
TWO_H200 = Measured(
    "h200",
    2,
    decoder(3072, 8192, 25, 24),
    (
        Row(NONE, 2, 26.1, 0.42),
        Row(NONE, 8, 36.3, 1.54),
        Row(STREAMED, 2, 18.2, 1.33 * 0.42, slots_gb=4),
        Row(STREAMED, 8, 28.4, 1.01 * 1.54, slots_gb=4),
        Row(BF16_MOMENTS, 2, 18.2, 1.105 * 0.42, slots_gb=4),
        Row(BF16_MOMENTS, 8, 28.4, 1.00 * 1.54, slots_gb=4),
        Row(ON_THE_CPU, 8, 24.1, 1.09 * 1.54),
    ),
)
# A host whose memory was slower than planned for: steps with CPU updates took 3.6 and 1.6 times as long as without.
TWO_H100 = Measured(
    "h100",
    2,
    decoder(3072, 8192, 25, 24),
    (
        Row(NONE, 1, 25.4),
        Row(NONE, 4, 27.3, 0.823),
        Row(STREAMED, 1, 17.7, 0.432, slots_gb=4),
        Row(STREAMED, 4, 19.6, 0.876, slots_gb=4),
        Row(BF16_MOMENTS, 1, 18.3, 0.272, slots_gb=4),
        Row(BF16_MOMENTS, 4, 20.2, 0.836, slots_gb=4),
        Row(ON_THE_CPU, 1, 8.92),
        Row(ON_THE_CPU, 4, 15.1),
    ),
)
FOUR_H100 = Measured(
    "h100",
    4,
    decoder(3072, 8192, 52, 24),
    (
        Row(NONE, 1, 25.9),
        Row(NONE, 4, 30.2, 1.657),
        Row(STREAMED, 1, 18.0, slots_gb=4),
        Row(STREAMED, 4, 22.3, slots_gb=4),
        Row(BF16_MOMENTS, 1, 18.6, slots_gb=4),
        Row(BF16_MOMENTS, 4, 22.9, slots_gb=4),
    ),
)
MEASURED = [(each, row) for each in (TWO_H200, TWO_H100, FOUR_H100) for row in each.rows]


def as_measured(run: Measured, row: Row) -> TrainingRun:
    sizes = {"hidden_size": run.shape.hidden, "gated_linear_unit": True}
    built = of(run.shape, run.ranks, seq_length=4096, micro_batch_size=row.sequences, **sizes)
    return built._replace(loss_bytes=run.loss_bytes, reserves=False)


@pytest.mark.parametrize(("measured", "row"), MEASURED)
def test_a_rank_s_peak_is_within_five_percent_of_what_was_measured(measured: Measured, row: Row) -> None:
    found = memory.estimate(as_measured(measured, row), row.mode)
    assert found.allocated_bytes / 1e9 + row.slots_gb == pytest.approx(row.peak_gb, rel=0.05)


@pytest.mark.parametrize(("measured", "row"), [each for each in MEASURED if each[1].step_s])
def test_what_a_step_took_lies_in_the_printed_range(measured: Measured, row: Row) -> None:
    run, rates = as_measured(measured, row), machine.known(measured.gpu, ranks_on_node=measured.ranks)
    found = memory.estimate(run, row.mode)
    span = time_range.step_range(run, row.mode, found, rates)
    assert row.step_s is not None
    assert span.least_s < row.step_s < span.most_s
    # The middle is as near as two runs of one row were.
    speed = compute.pace(run, rates, found.parameters.shard)
    step = step_time.estimate(run, row.mode, found, rates, speed)
    assert step.total_s == pytest.approx(row.step_s, rel=0.1)


def lines(found: memory.Memory) -> dict[str, int]:
    return {line.name: line.bytes for line in found.gpu}


def test_twice_the_ranks_hold_half_the_shards_and_the_same_blocks() -> None:
    two, four = (memory.estimate(of("llama-3-8b", gpus), NONE) for gpus in (2, 4))
    for name in ("weights", "gradients", "moments"):
        assert lines(four)[name] == pytest.approx(lines(two)[name] / 2, rel=1e-6)
    held = two.parameters.total
    assert lines(two)["weights"] == pytest.approx(4 * held / 2, rel=1e-6)
    for name in ("gathered blocks", "gradients of two blocks"):
        assert lines(four)[name] == lines(two)[name]


def test_shards_in_bf16_take_the_same_without_offload_and_half_on_the_gpu_with_it() -> None:
    wide, narrow = of("llama-3-8b", 4), of("llama-3-8b", 4, shard_dtype="bfloat16")
    shard = memory.estimate(wide).parameters.shard
    held = [memory.estimate(run).between_steps_bytes for run in (wide, narrow)]
    assert held[1] - held[0] == pytest.approx(
        2 * shard, rel=0.01
    )  # masters beside weights; gradients come and go
    gone = [memory.estimate(run, ON_THE_CPU).between_steps_bytes for run in (wide, narrow)]
    assert gone[0] - gone[1] == pytest.approx(2 * shard, rel=0.01)


def test_the_ranks_of_a_host_add_up_its_memory_and_share_its_rates() -> None:
    two, eight = (memory.estimate(of("llama-3-8b", gpus), offloaded(0.5)) for gpus in (2, 8))
    assert two.host_bytes_per_node == pytest.approx(eight.host_bytes_per_node, rel=1e-6)
    assert two.pinned_bytes_per_node == pytest.approx(eight.pinned_bytes_per_node, rel=1e-6)
    elements = two.parameters.total / 2
    # 4 B of staging beside 12 of states updated on the CPU, 8 of streamed ones; fp32 shards are their masters.
    assert two.host_bytes_per_node == pytest.approx((16 + 8) * elements, rel=1e-6)
    assert two.pinned_bytes_per_node == pytest.approx((4 + 8) * elements, rel=1e-6)
    rates = [machine.known("h100", ranks_on_node=ranks) for ranks in (2, 8)]
    seconds = [
        optimizer.update_seconds(found.parameters.shard, 0, each, weight_bytes=4)
        for found, each in zip((two, eight), rates, strict=True)
    ]
    # Two ranks reach no more than their cores can use of the host, eight all of it.
    assert seconds[0] / seconds[1] == pytest.approx(2 * rates[1].dram * 2 / rates[0].dram, rel=0.01)


def test_ranks_of_a_desktop_share_what_it_has() -> None:
    one, two = (machine.known("rtx4090", ranks_on_node=ranks) for ranks in (1, 2))
    assert two.dram == pytest.approx(one.dram / 2)
    assert two.host_memory_bytes == one.host_memory_bytes


def test_two_gpus_of_a_dgx_a100_share_a_link_to_the_host() -> None:
    four, eight = (machine.known("a100", ranks_on_node=ranks) for ranks in (4, 8))
    assert four.h2d_copy == machine.known("a100", ranks_on_node=1).h2d_copy == 2 * eight.h2d_copy
    assert four.update_link == 2 * eight.update_link
    assert machine.known("h100", ranks_on_node=8).h2d_copy == machine.known("h100", ranks_on_node=1).h2d_copy


def test_a_profile_that_one_process_measured_is_shared_by_the_ranks(tmp_path: Path) -> None:
    rates = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "h2d_pinned_GBs": 55,
        "d2h_pinned_GBs": 55,
        "duplex_total_GBs": 100,
        "host_triad_GBs": 200,
        "cpu_adam_fused_Gparam_s": 6,
        "cpu_adam_perparam_fused_Gparam_s": 5,
        "bf16_matmul_TFLOPs": 700,
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(rates), encoding="utf-8")
    one, four = (machine.read_profile(str(path), ranks=ranks) for ranks in (1, 4))
    assert (four.dram, four.update_dram, four.update_cpu) == pytest.approx(
        (one.dram / 4, one.update_dram / 4, one.update_cpu / 4)
    )
    assert four.h2d_copy == one.h2d_copy
    # A probe of one GPU says nothing of NVLink; that card's is known.
    assert four.peers == machine.known("h100").peers


def test_gathers_hide_behind_blocks_unless_the_network_is_slow() -> None:
    run = of("llama-3-8b", 16, seq_length=8192)
    rates = machine.known("h100", ranks_on_node=8)
    found = memory.estimate(run)
    speed = compute.pace(run, rates, found.parameters.shard)

    def exposed(network: float) -> float:
        slow = rates._replace(network=network)
        between = collectives.of_micro_batch(run, found.parameters, slow)
        return sum(cost.exposed_s for cost in collectives.costs(run, between, speed, 0.0))

    assert exposed(50e9) < 0.05 * speed.step_s
    # Half the bytes of 2 + 2 + 4 a parameter come from the other node, an eighth of them for each rank.
    bound = 8 * found.parameters.total / 2 / 8 / 1e8 - speed.forward_s - speed.backward_s
    assert exposed(1e8) == pytest.approx(bound, rel=0.05)


def test_gpus_without_nvlink_gather_over_the_link_that_offload_uses() -> None:
    assert not machine.known("h100").peers_on_link
    rates = machine.known("rtx4090", ranks_on_node=4)
    assert rates.peers_on_link
    run = of("llama-3-8b", 4)
    found = memory.estimate(run)
    speed = compute.pace(run, rates, found.parameters.shard)
    between = collectives.of_micro_batch(run, found.parameters, rates)
    left = collectives.left_for_copies(speed, between, rates)
    assert left.forward_s < speed.forward_s
    assert left.backward_s < speed.backward_s


def test_gradients_that_add_up_stay_on_the_gpu() -> None:
    """Of several backwards a step only the last sends the CPU's share off; by then all shards have gradients."""
    once, twice = (
        memory.estimate(of("llama-3-8b", 4, gradient_accumulation_steps=steps), ON_THE_CPU)
        for steps in (1, 2)
    )
    assert "gradients" not in lines(once)
    assert lines(twice)["gradients"] == pytest.approx(4 * twice.parameters.shard, rel=1e-6)


def test_beside_what_streams_the_gradients_of_one_block_of_the_cpu_s_share_stay() -> None:
    """Reduced gradients of a block are one buffer, and one block is cut so that shares are exact."""
    found = [memory.estimate(of("llama-3-8b", 4), offloaded(share)) for share in (0.0, 0.5, 0.999, 1.0)]
    none, half, most, everything = (lines(each).get("gradients", 0) for each in found)
    shard, block = found[0].parameters.shard, (8.03e9 - 2 * 128_256 * 4096) / 32 / 4
    assert none == 0
    assert half == pytest.approx(4 * (shard / 2 + block), rel=0.01)
    # The rest is smaller than a block.
    assert most == everything == pytest.approx(4 * shard, rel=1e-6)


def test_a_tied_table_stays_gathered_from_forward_to_the_end_of_backward() -> None:
    tied = of("qwen3-4b", 4)
    table = tied.shape.vocab * tied.shape.hidden
    assert lines(memory.estimate(tied))["gathered table"] == pytest.approx(2 * table, rel=0.01)
    assert "gathered table" not in lines(memory.estimate(of("llama-3-8b", 4)))


@pytest.mark.parametrize(
    ("mode", "peak_gib", "step_s"),
    [
        pytest.param(Mode(), 13.85, (0.171, 0.183), id="no offload"),
        pytest.param(
            offloaded(0.9)._replace(optimizer_fraction=0.36, streamed_fraction=0.324),
            9.66,
            (0.254,),
            id="36 % off",
        ),
        pytest.param(Mode(trained_layers=True, recompute=FULL), 4.26, (0.642,), id="everything off"),
    ],
)
def test_a_traced_model_with_a_tied_table_took_what_is_predicted(
    mode: Mode, peak_gib: float, step_s: tuple[float, ...]
) -> None:
    """Llama 3.2 1B, one sequence of 2,048 tokens, as `verify --plan` trained it on two H100 (torch 2.11).

    So few tokens that the host's launches are the step's time.
    """
    run = traces.with_what_ships(of("llama-3.2-1b", 2, seq_length=2048, micro_batch_size=1))
    found = memory.estimate(run, mode)
    assert found.allocated_bytes == pytest.approx(peak_gib * GIB, rel=0.03)
    h100 = machine.known("h100", ranks_on_node=2)
    least_s, most_s = time_range.step_range(run, mode, found, h100)
    assert all(least_s < each < most_s for each in step_s)


ALL_OFF = Mode(trained_layers=True, recompute=FULL)


def test_everything_off_leaves_what_two_gathers_read() -> None:
    run = of(FOUR_H100.shape, 4, seq_length=4096, hidden_size=4096, gated_linear_unit=True)
    found = memory.estimate(run, ALL_OFF)
    shard = found.parameters.shard
    assert found.host_bytes_per_node == found.pinned_bytes_per_node == pytest.approx(4 * 16 * shard)
    resident = memory.estimate(run, NONE)
    for name in ("gathered blocks", "gradients of two blocks"):
        assert lines(found)[name] == lines(resident)[name]
    # 2 x 4 B of a block's shard, and three chunks of 32 MiB with gradients.
    assert found.between_steps_bytes < 0.8 * GIB
    # Slots are there from step to the end of forward, and the most is alive elsewhere.
    assert "streaming slots" not in lines(found)
    narrow = run._replace(streamed_states=StreamedStates.PACKED)
    packed = memory.estimate(narrow, ALL_OFF._replace(streamed_states=StreamedStates.PACKED))
    assert packed.host_bytes_per_node == pytest.approx(4 * 12 * shard)


def test_everything_off_is_as_slow_as_its_36_bytes_a_parameter_or_as_its_compute() -> None:
    rates = machine.known("h100", ranks_on_node=4)
    for tokens, hides in ((256, False), (65536, True)):
        run = of(FOUR_H100.shape, 4, seq_length=tokens, hidden_size=4096, gated_linear_unit=True)
        found = memory.estimate(run, ALL_OFF)
        speed = compute.pace(run, rates, found.parameters.shard)
        step = step_time.estimate(run, ALL_OFF, found, rates, speed)
        copies = [cost for cost in step.costs if cost.name.startswith("shards and")]
        shard = found.parameters.shard
        # In forward 16 B come and 12 go, in backward 4 each way; this host's memory carries all of them in time.
        assert sum(cost.work_s for cost in copies) == pytest.approx(shard * (16 + 4) / rates.update_link)
        assert (sum(cost.exposed_s for cost in copies) == 0) == hides


def test_replicas_keep_all_and_gradients_in_their_buckets() -> None:
    run = of("llama-3-8b", 4, sharding="replicas")
    one, found = memory.estimate(of("llama-3-8b", 1)), memory.estimate(run, ON_THE_CPU)
    assert found.parameters.shard == one.parameters.shard
    assert lines(found)["gradients"] == pytest.approx(2 * found.parameters.total, rel=1e-6)
    assert found.host_bytes_per_node == pytest.approx(4 * 14 * found.parameters.total, rel=1e-6)


def test_the_ring_of_fp32_shards_has_no_masters() -> None:
    elements = streamed_states.chunk_elements(StreamedStates.EXACT, own_master=True)
    assert elements == 96 * 2**20 // 8
    ring = streamed_states.ring_bytes(of("llama-3-8b", 4), StreamedStates.EXACT, 10**9)
    assert ring == (3 * 8 + 4) * elements


def test_packed_states_of_shards_need_their_slots_alone() -> None:
    packed = Mode(
        optimizer_fraction=1,
        streamed_fraction=1,
        optimizer_engine=OptimizerEngine.REFERENCE,
        streamed_states=StreamedStates.PACKED,
    )
    sharded, whole = (
        lines(memory.estimate(run, packed))
        for run in (of("llama-3-8b", 4, shard_dtype="bfloat16"), of("llama-3-8b", 1))
    )
    assert sharded["streaming slots"] == whole["streaming slots"]


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["llama-3.2-1b", "qwen3-8b", "llama-3-70b", "qwen3-30b-a3b"]),
    st.sampled_from([2, 4, 8, 16]),
    st.integers(min_value=12, max_value=140),
    st.integers(min_value=50, max_value=2000),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_a_recommendation_keeps_both_budgets_on_any_ranks(
    model: str, gpus: int, gpu_gib: int, host_gib: int, dtype: str
) -> None:
    run, budget = of(model, gpus, shard_dtype=dtype), Budget(gpu_gib * GIB, host_gib * GIB)
    rates = machine.known("h100", ranks_on_node=run.layout.ranks_on_node)
    found = planner.make_plan(config(), run, rates, budget, shape_source="", versions={})
    if found.recommendation is not None:
        best = found.recommendation.memory
        assert best.device_bytes <= budget.most_gpu_bytes
        assert best.host_bytes_per_node <= 0.95 * host_gib * GIB
        assert best.pinned_bytes_per_node <= best.host_bytes_per_node


def test_shards_keep_their_dtype_beside_a_trace_in_bf16(tmp_path: Path) -> None:
    document = json.loads(knowledge_path("traces", "llama-3-8b.json").read_text(encoding="utf-8"))
    run = of("llama-3-8b", 4)
    elements = document["weights_bytes"] // 2
    counted = {"parameters": elements, "trained_parameters": elements, "largest_parameter": [128256, 4096]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document | counted), encoding="utf-8")
    traced = traces.run_of(str(path), run, names_the_model=False)
    found = memory.estimate(traced, NONE)
    assert found.parameters.shard == found.parameters.total // 4 == elements // 4
    assert lines(found)["weights"] == 4 * (elements // 4)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", "--framework", "pytorch", "--gpu", "h100", *arguments]) == code
    return capsys.readouterr().out


LARGE = ("--model", "llama-3-70b", "--gpus", "8")


def test_the_answer_says_in_ten_lines_how_to_launch_shard_and_offload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = planned(capsys, *LARGE, "--host-memory", "1863GiB")
    assert len(out.splitlines()) == 10
    assert "no host memory is stated" in planned(capsys, *LARGE)
    assert "on 8 x h100 (sharded by FSDP2)" in out
    assert "torchrun --nproc-per-node 8 train.py" in out
    assert "for module in (*blocks, embedding, head, model): fully_shard(module, mp_policy=" in out
    assert "apply_plan(model, optimizer" in out


def test_what_fits_as_it_is_has_to_be_sharded_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--model", "qwen3-4b", "--gpus", "16")
    assert "nothing to change" in out
    assert "--nnodes 2" in out
    assert "for module in (*blocks, model): fully_shard(" in out  # the tied table belongs to the root


def test_the_document_says_what_the_model_must_be(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(planned(capsys, *LARGE, "--format", "json"))
    assert document["execute"]["sharding"] == {"engine": "fsdp2", "ranks": 8, "weights": "float32"}
    assert document["layout"]["sharding"] == "fsdp2"
    assert_follows(document, "plan")
    words = (*LARGE, "--format", "json", "--overrides", "sharding=replicas lora_rank=16")
    replicas = json.loads(planned(capsys, *words, "--gpu-memory", "141GiB"))
    assert replicas["layout"]["sharding"] == "replicas"
    assert "sharding" not in replicas["execute"]
    assert_follows(replicas, "plan")


def test_more_gpus_and_shards_in_bf16_are_ways_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--model", "llama-3-70b", "--gpus", "4", code=2)
    assert "8 GPUs with FSDP2" in out
    assert "shards in bf16" in out


@pytest.mark.parametrize(
    ("gpus", "overrides", "named"),
    [
        ("1", "sharding=fsdp2", "--gpus 2"),
        ("1", "shard_dtype=bfloat16", "--gpus 2"),
        ("2", "sharding=zero3", "fsdp2, replicas"),
        ("2", "shard_dtype=int8", "float32, bfloat16"),
        ("2", "sharding=replicas shard_dtype=bfloat16", "has no shards"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], gpus: str, overrides: str, named: str
) -> None:
    words = ["--model", "llama-3-8b", "--gpus", gpus, "--overrides", overrides]
    assert main(["plan", "--framework", "pytorch", "--gpu", "h100", *words]) == 2
    assert named in capsys.readouterr().err
