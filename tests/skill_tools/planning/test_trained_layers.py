# SPDX-License-Identifier: Apache-2.0
"""Trained layers that stream, as a plan: bytes, seconds, when they win, and when they are none."""

import json

import pytest
from for_each import for_each

from skill_tools.__main__ import main
from skill_tools.dialects.pytorch import candidates as pytorch_candidates
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import Mode, Recompute, StreamedStates, TrainingRun
from skill_tools.planning.cost import compute, machine, step_time
from skill_tools.planning.cost import trained_layers as trained_layers_cost
from skill_tools.planning.model import known_models, memory, trained_layers
from skill_tools.planning.model.streamed_states import element_bytes
from tests.skill_tools.planning.test_plan_properties import config

LABEL = "trained layers streamed"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    given = ["--framework", "pytorch", "--model", "llama-3-8b", "--gpu", "4090", "--format", "json"]
    assert main(["plan", *given, *arguments]) == code
    return json.loads(capsys.readouterr().out)


def labels(found: dict) -> list[str]:
    best = [found["recommendation"]["option"]] if found["recommendation"] else []
    return [option["label"] for option in (*best, *found["alternatives"])]


def test_a_model_larger_than_the_gpu_has_an_exact_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--host-memory", "128GiB")
    placed = "layer inputs on the host, 5% of states resident"
    assert found["recommendation"]["option"]["label"] == f"{LABEL}, 30 layers' weights resident, {placed}"
    assert found["execute"] == {
        "trained_layers": {
            "inputs": "host",
            "streamed_states": "exact",
            "resident_layers": 30,
            "split": {"resident": 0.05, "streamed": 0.95, "cpu": 0.0},
        }
    }


def test_a_small_gpu_keeps_as_many_layers_as_it_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    least = plan(capsys, "--gpu-memory", "12GiB", "--host-memory", "128GiB")["execute"]["trained_layers"]
    some = plan(capsys, "--gpu-memory", "16GiB", "--host-memory", "128GiB")["execute"]["trained_layers"]
    assert 0 <= least.get("resident_layers", 0) < some["resident_layers"] < 30


@pytest.mark.parametrize(
    ("overrides", "updates"),
    [
        ((), False),
        (("max_grad_norm=0",), True),
        (("max_grad_norm=0", "gradient_accumulation_steps=2"), False),
    ],
)
def test_the_update_is_in_backward_where_nothing_is_clipped_nor_added_up(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], updates: bool
) -> None:
    found = plan(capsys, "--host-memory", "512GiB", "--overrides", "seq_length=4096", *overrides)
    assert found["execute"]["trained_layers"].get("backward_overlap") == ("update" if updates else None)
    on_host = [line["name"] for line in found["recommendation"]["option"]["memory"]["host_per_rank"]]
    assert ("gradients" in on_host) is not updates


def test_what_rounds_states_has_to_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, code=2).get("recommendation") is None
    found = plan(capsys, "--allow-other-numerics")
    assert found["execute"]["trained_layers"]["streamed_states"] == "compact-8"


def test_the_answer_has_the_line_for_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--framework",
        "pytorch",
        "--model",
        "llama-3-8b",
        "--gpu",
        "4090",
        "--host-memory",
        "128GiB",
    ]
    assert main(["plan", *arguments]) == 0
    made = (
        "TrainableLayerStreamer(model, optimizer, resident_layers=30, split=(0.05, 0.95, 0.0), inputs='host')"
    )
    assert made in capsys.readouterr().out


def test_what_keeps_more_on_the_gpu_wins_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--gpu-memory", "80GiB", "--host-memory", "512GiB")
    assert not found["recommendation"]["option"]["label"].startswith(LABEL)
    assert any(label.startswith(LABEL) for label in labels(found))


@pytest.mark.parametrize("refused", [("--overrides", "lora_rank=16"), ("--gpus", "2")])
def test_adapters_and_replicas_are_not_for_it(
    capsys: pytest.CaptureFixture[str], refused: tuple[str, ...]
) -> None:
    found = plan(capsys, "--gpu-memory", "80GiB", "--host-memory", "2048GiB", *refused)
    assert not any(label.startswith(LABEL) for label in labels(found))


def of_8b(**overrides: object) -> TrainingRun:
    return pytorch_run.build(config(**overrides), known_models.shape("llama-3-8b"), gpus=1)


def mode(states: StreamedStates) -> Mode:
    return Mode(trained_layers=True, streamed_states=states, recompute=Recompute(granularity="full"))


@pytest.mark.parametrize(
    ("states", "gigabytes"),
    # The published table is of 16.1 GB of weights; those of embedding and head, 2.1 GB, are on the GPU.
    [("exact", 112.4), ("packed", 80.3), ("compact-16", 64.7), ("compact-8", 56.7)],
)
def test_the_host_holds_weights_gradients_and_states(states: str, gigabytes: float) -> None:
    found = memory.estimate(of_8b(), mode(StreamedStates(states)))
    assert sum(line.bytes for line in found.host) / 1e9 == pytest.approx(gigabytes - 2.1, abs=0.15)
    assert [line.name for line in found.host] == ["weights of blocks", "gradients", "masters and moments"]


def alive(states: str, *, updates: bool = False, **overrides: object) -> set[str]:
    found = memory.estimate(
        of_8b(**overrides), mode(StreamedStates(states))._replace(updates_in_backward=updates)
    )
    return {line.name for line in found.gpu}


def test_chunks_of_states_count_in_the_moments_that_have_them() -> None:
    """Where many tokens are recomputed they have left, unless backward updates, and where the loss is the most, not."""
    in_backward = {"gradients of a block", "gradients that leave", "one layer's work"}
    long = alive("exact", seq_length=65536, fused_loss=True)
    assert in_backward | {"scratch of an update"} <= long
    assert "streaming slots" not in long
    assert in_backward | {"streaming slots"} <= alive(
        "exact", updates=True, seq_length=65536, fused_loss=True
    )
    in_loss = alive("exact", seq_length=4096)
    assert {"streaming slots", "logits and loss"} <= in_loss
    assert not in_backward & in_loss
    # Of few tokens the head's gradient is more than all logits, and the chunks more than a block's gradients.
    assert {"streaming slots", "gradients of the head"} <= alive("compact-8", seq_length=64)


def test_between_steps_there_are_chunks_of_states_whatever_the_peak_has() -> None:
    found = memory.estimate(of_8b(seq_length=65536, fused_loss=True), mode(StreamedStates.COMPACT_8))
    always = sum(line.bytes for line in found.gpu if line.when == "always")
    # Three of 96 MiB, with gradients of 2 bytes beside each 3.0625 bytes; a block is cut into chunks of one length.
    whole = 3 * 96 * 2**20 * (1 + 2 / 3.0625)
    assert 0.9 * whole < found.between_steps_bytes - always <= whole


def test_a_weight_in_fp32_is_its_own_master() -> None:
    run = of_8b()
    wide = run._replace(precision=run.precision._replace(weight_bytes=4, gradient_bytes=4))
    found = {line.name: line.bytes for line in memory.estimate(wide, mode(StreamedStates.EXACT)).host}
    assert found["masters and moments"] == 2 * found["gradients"]


def test_the_step_is_as_long_as_backward_s_copies_and_the_update_s_where_nothing_is_computed() -> None:
    run, states = of_8b(seq_length=16), StreamedStates.COMPACT_8
    rates = machine.known("h200")._replace(update_dram=1e15)
    found = memory.estimate(run, mode(states))
    held = found.parameters.total
    size = trained_layers.sizes(run, held)
    speed = compute.pace(run, rates, found.parameters.shard)
    step = step_time.estimate(run, mode(states), found, rates, speed)
    states_in = (2 * size.in_blocks + (2 + element_bytes(run, states)) * held) / rates.update_link
    assert step.total_s >= states_in + 2 * size.in_blocks / rates.duplex_copy
    assert step.total_s <= 1.02 * (states_in + 2 * held / rates.duplex_copy)


def test_a_batch_too_large_for_a_layer_is_taken_in_slices(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu-memory", "16GiB", "--host-memory", "512GiB", "--overrides", "fused_loss=true")
    whole = plan(capsys, *given, "micro_batch_size=8")["execute"]["trained_layers"]
    assert "slices" not in whole
    found = plan(capsys, *given, "micro_batch_size=32")
    assert found["execute"]["trained_layers"]["slices"] in {4, 16, 32}
    assert "in fp32" in str(found["recommendation"]["option"]["memory"]["gpu"])


def test_in_backward_the_states_pass_with_the_weights_that_stream_and_no_gradient() -> None:
    run, states = of_8b(seq_length=16, max_grad_norm=0), StreamedStates.COMPACT_8
    rates = machine.known("h200")._replace(update_dram=1e15)
    chosen = mode(states)._replace(updates_in_backward=True, resident_layers=8)
    found = memory.estimate(run, chosen)
    held = found.parameters.total
    weights = 2 * trained_layers.sizes(run, held).in_blocks * 24 / 32
    step = step_time.estimate(
        run, chosen, found, rates, compute.pace(run, rates, found.parameters.shard)
    ).total_s
    backward = (weights + element_bytes(run, states) * held) / rates.update_link
    assert backward + weights / rates.h2d_copy <= step <= 1.02 * (backward + weights / rates.h2d_copy)


def test_enough_tokens_hide_the_copies() -> None:
    run = of_8b(seq_length=65536)
    rates = machine.known("h200")
    found = memory.estimate(run, mode(StreamedStates.COMPACT_8))
    speed = compute.pace(run, rates, found.parameters.shard)
    step = step_time.estimate(run, mode(StreamedStates.COMPACT_8), found, rates, speed)
    beyond = step.total_s - speed.step_s - speed.layers_forward_s - speed.gpu_update_s
    # The states of embedding and head alone.
    assert 0 < beyond < 0.01 * step.total_s


ALONE = ("--host-memory", "128GiB", "--without", "optimizer-offload")


def test_what_is_left_of_the_gpu_holds_states(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *ALONE)
    option, whole = found["recommendation"]["option"], found["budget"]["gpu_bytes"]
    split = found["execute"]["trained_layers"]["split"]
    assert split["resident"] > 0
    assert sum(split.values()) == pytest.approx(1)
    # Of the headroom less than a hundredth of the states is left.
    assert 0.95 * whole - option["memory"]["device_bytes"] < 0.01 * 10 * 8.03e9
    lines = {line["name"]: line["bytes"] for line in option["memory"]["gpu"]}
    assert lines["resident masters and moments"] == pytest.approx(split["resident"] * 10 * 8.03e9, rel=0.01)


def test_states_stay_on_the_host_where_the_step_gains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--overrides", "seq_length=65536", "fused_loss=true", "--gpu-memory", "80GiB")
    found = plan(capsys, "--host-memory", "512GiB", "--without", "optimizer-offload", *long)
    assert found["execute"]["trained_layers"].get("split", {}).get("resident", 0) < 0.1


def test_states_that_a_small_host_cannot_hold_stay(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--gpu", "h100", "--gpu-memory", "60GiB", "--host-memory", "56GiB")
    assert found["execute"]["trained_layers"]["split"]["resident"] > 0.4


SLOW_LINK = "tflops=312,link_GBs=12,dram_GBs=150,hbm_GBs=1500"


def test_a_host_that_is_faster_than_the_link_updates_some(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu", SLOW_LINK, "--gpu-memory", "16GiB", *ALONE)
    found = plan(capsys, *given)
    split = found["execute"]["trained_layers"]["split"]
    assert split["cpu"] > 0.5
    lines = {
        line["name"]: line["bytes"] for line in found["recommendation"]["option"]["memory"]["host_per_rank"]
    }
    on_cpu = lines["masters and moments on the CPU"]
    assert on_cpu == pytest.approx(split["cpu"] * 12 * 8.03e9, rel=0.01)
    # They are not pinned.
    memory = found["recommendation"]["option"]["memory"]
    assert memory["pinned_bytes_per_node"] <= memory["host_bytes_per_node"] - on_cpu
    # Nothing else fits, so it is the same without an exclusion.
    assert plan(capsys, *given[:-2])["execute"] == found["execute"]


def test_states_are_placed_only_where_layers_have_to_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Optimizer offload is simpler: placed states would be as fast, and their weights are no ordinary tensors."""
    given = ("--gpu", "h200", "--model", "qwen3-4b", "--host-memory", "128GiB")
    for gpu_memory, streams in (("16GiB", True), ("24GiB", False)):
        found = plan(capsys, *given, "--gpu-memory", gpu_memory)
        assert ("trained_layers" in found["execute"]) is streams
        if streams:
            split = found["execute"]["trained_layers"]["split"]
            assert split["resident"] > 0.05
            assert split["cpu"] > 0.1
            assert found["recommendation"]["option"]["memory"]["device_bytes"] > 0.93 * 16 * 2**30


@for_each(range(101))
def test_what_streams_is_never_less_than_nothing(hundredths: int) -> None:
    """With all states but the resident ones updated on the CPU."""
    resident = hundredths / 100
    chosen = Mode(trained_layers=True, states_resident=resident, states_on_cpu=round(1 - resident, 4))
    section = pytorch_candidates.execute(chosen, of_8b(), 0)["trained_layers"]
    assert section["split"] == {"resident": resident, "streamed": 0, "cpu": round(1 - resident, 4)}


@pytest.mark.parametrize("states", StreamedStates)
def test_the_best_share_on_the_cpu_is_best(states: StreamedStates) -> None:
    run = of_8b(seq_length=16)
    rates = machine.known("a100")
    share = trained_layers_cost.best_cpu_share(run, states, rates)
    found = memory.estimate(run, mode(states))
    speed = compute.pace(run, rates, found.parameters.shard)

    def step_s(on_cpu: float) -> float:
        chosen = mode(states)._replace(states_on_cpu=on_cpu)
        return step_time.estimate(run, chosen, memory.estimate(run, chosen), rates, speed).total_s

    tried = min(step_s(hundredths / 100) for hundredths in range(101))
    # Where it gains less than a tenth of the update, nothing is updated there.
    assert step_s(share) <= (1.01 if share else 1.11) * tried
