# SPDX-License-Identifier: Apache-2.0
"""Peaks of real models, measured on one NVIDIA H100 (GiB) and one H200 (GB) with torch 2.11 and transformers 5.17.

The memory model has the models' shipped traces and nothing fitted to these rows.
"""

import statistics
from typing import NamedTuple

import pytest

from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import (
    ActivationEngine,
    Mode,
    OptimizerEngine,
    Precision,
    Recompute,
    TrainingRun,
)
from skill_tools.planning.cost import compute, machine, step_time, time_range
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import known_models, memory, traces
from skill_tools.units import GIB

GB = 10**9
MASTERS = Precision(gradient_bytes=2, gradient_is_buffer=False)
BF16_STATES = Precision(gradient_bytes=2, master_bytes=0, moments_bytes=4, gradient_is_buffer=False)
CHECKPOINTS = Recompute(granularity="full")


def off(fraction: float, recompute: Recompute | None = None) -> Mode:
    """The planner's split of an H100: 13 percent of the offloaded states stream."""
    return Mode(
        optimizer_fraction=fraction,
        streamed_fraction=0.13 * fraction,
        optimizer_engine=OptimizerEngine.REFERENCE,
        recompute=recompute,
    )


class Row(NamedTuple):
    model: str
    sequences: int
    length: int
    mode: Mode
    measured: float
    precision: Precision = MASTERS
    gpu: str = "h100"
    step_s: float = 0.0


ROWS = {
    "plain, bf16 states": Row("qwen3-4b", 1, 2048, Mode(), 37.75 * GIB, BF16_STATES, step_s=0.208),
    "91 % off": Row("qwen3-8b", 1, 2048, off(0.91), 42.40 * GIB, step_s=1.79),
    "68 % off": Row("llama-3-8b", 1, 2048, off(0.68), 59.49 * GIB, step_s=1.66),
    "checkpointing, 50 % off": Row("qwen3-4b", 1, 4096, off(0.5, CHECKPOINTS), 38.11 * GIB, step_s=0.77),
    "checkpointing": Row(
        "qwen3-4b", 1, 4096, Mode(recompute=CHECKPOINTS), 66.38 * GB, gpu="h200", step_s=0.444
    ),
    "checkpointing, 4 sequences": Row(
        "qwen3-4b", 4, 4096, Mode(recompute=CHECKPOINTS), 90.0 * GB, gpu="h200", step_s=1.507
    ),
    "checkpointing, all off": Row("qwen3-4b", 1, 4096, off(1.0, CHECKPOINTS), 16.86 * GB, gpu="h200"),
    "checkpointing, all off, 4 sequences": Row(
        "qwen3-4b", 4, 4096, off(1.0, CHECKPOINTS), 41.78 * GB, gpu="h200"
    ),
    "FSDP2, all on the CPU": Row(
        "qwen3-4b", 1, 4096, Mode(offload_parameters=True, recompute=CHECKPOINTS), 9.15 * GB, gpu="h200"
    ),
    "FSDP2, all on the CPU, 4 sequences": Row(
        "qwen3-4b", 4, 4096, Mode(offload_parameters=True, recompute=CHECKPOINTS), 34.07 * GB, gpu="h200"
    ),
}


def run_of(row: Row, *, by_trace: bool = True) -> TrainingRun:
    shape = known_models.shape(row.model)
    return TrainingRun(
        dialect="pytorch",
        shape=shape,
        layout=Layout(),
        seq_length=row.length,
        micro_batch=row.sequences,
        precision=row.precision,
        shards_optimizer=False,
        loss_bytes=12,
        norm_bytes=4,
        fused_activation=False,
        is_eager=True,
        widens_gradients=True,
        traced=traces.of_shape(shape) if by_trace else None,
    )


def error(row: Row, *, by_trace: bool = True) -> float:
    return memory.estimate(run_of(row, by_trace=by_trace), row.mode).allocated_bytes / row.measured - 1


@pytest.mark.parametrize("name", ROWS)
def test_a_traced_models_peak_is_what_was_measured(name: str) -> None:
    assert error(ROWS[name]) == pytest.approx(0, abs=0.06)


def test_half_of_the_peaks_are_within_three_percent() -> None:
    assert statistics.median(abs(error(row)) for row in ROWS.values()) <= 0.03


@pytest.mark.parametrize("name", ROWS)
def test_the_formula_is_within_eight_percent_of_them(name: str) -> None:
    assert error(ROWS[name], by_trace=False) == pytest.approx(0, abs=0.08)


def test_between_steps_states_and_weights_stay() -> None:
    row = ROWS["checkpointing"]
    found = memory.estimate(run_of(row), row.mode)
    assert found.between_steps_bytes == pytest.approx(56.78 * GB, rel=0.01)


def test_a_tied_tables_gradients_meet_at_the_end_of_backward() -> None:
    """Where gradients stay, a trace's peak is there; without the sum the formula would be 1.45 GiB below it."""
    row = Row("qwen3-4b", 1, 2048, Mode(recompute=CHECKPOINTS), 0, BF16_STATES)
    traced, by_formula = (memory.estimate(run_of(row, by_trace=way), row.mode) for way in (True, False))
    assert by_formula.allocated_bytes == pytest.approx(traced.allocated_bytes, rel=0.01)
    assert "gradients of the tied table" in [line.name for line in by_formula.gpu]


@pytest.mark.parametrize("mode", [Mode(), off(1.0), Mode(recompute=CHECKPOINTS)])
@pytest.mark.parametrize("model", traces.names())
def test_where_there_is_no_trace_the_formula_is_within_eight_percent_of_one(model: str, mode: Mode) -> None:
    traced, by_formula = (
        memory.estimate(run_of(Row(model, 1, 2048, mode, 0), by_trace=by_trace), mode).allocated_bytes
        for by_trace in (True, False)
    )
    assert by_formula == pytest.approx(traced, rel=0.08)


TIMED = [name for name, row in ROWS.items() if row.step_s]


def span(row: Row, given: Machine) -> tuple[float, float, float]:
    """The step as predicted, and its range."""
    run = run_of(row)
    found = memory.estimate(run, row.mode)
    speed = compute.pace(run, given, found.parameters.shard)
    step = step_time.estimate(run, row.mode, found, given, speed)
    return step.total_s, *time_range.step_range(run, row.mode, found, given)


@pytest.mark.parametrize("name", TIMED)
def test_the_measured_time_lies_in_the_range(name: str) -> None:
    row = ROWS[name]
    _, least_s, most_s = span(row, machine.known(row.gpu, ranks_on_node=1))
    assert least_s <= row.step_s <= most_s


@pytest.mark.parametrize("name", TIMED)
def test_a_probed_machine_narrows_the_range(name: str) -> None:
    by_name = machine.known(ROWS[name].gpu, ranks_on_node=1)
    step_s, least_s, most_s = span(ROWS[name], by_name._replace(measured=True))
    assert least_s <= step_s <= most_s
    _, named_least_s, named_most_s = span(ROWS[name], by_name)
    assert most_s - least_s <= named_most_s - named_least_s


@pytest.mark.parametrize(("model", "measured_s"), [("gemma-3-4b", 0.234), ("qwen3-4b", 0.228)])
def test_few_tokens_take_what_the_host_takes_to_launch_them(model: str, measured_s: float) -> None:
    """Forward and backward of 2,048 tokens, each layer computed twice, on one H200 where nothing was offloaded."""
    run = run_of(Row(model, 1, 2048, Mode(recompute=CHECKPOINTS), 0))
    h200 = machine.known("h200", ranks_on_node=1)
    endless = h200._replace(gemm=1e20, hbm=1e20)
    assert run.traced is not None
    slow, fast = time_range.slowest(run, h200), time_range.fastest(run, h200)
    least_s, step_s, most_s, launches_s = (
        compute.traced_seconds(run, run.traced.recomputed, each) for each in (fast, h200, slow, endless)
    )
    assert step_s == pytest.approx(measured_s, rel=0.25)
    assert least_s <= measured_s <= most_s
    assert 0.6 * measured_s <= launches_s <= step_s


@pytest.mark.parametrize(("model", "measured_s"), [("gemma-3-4b", 0.219), ("qwen3-4b", 0.168)])
def test_a_probe_says_how_fast_a_host_launches(model: str, measured_s: float) -> None:
    """As above with nothing computed twice, on a host whose probe found 17.3 us a launch."""
    run = run_of(Row(model, 1, 2048, Mode(), 0))
    assert run.traced is not None
    plain = run.traced.plain
    rates = machine.known("h200", ranks_on_node=1)
    probed, twice = (
        rates._replace(measured=True, launch_s=factor * 17.3e-6 * machine.model_constants()["launch_factor"])
        for factor in (1, 2)
    )
    assert compute.traced_seconds(run, plain, probed) == pytest.approx(measured_s, rel=0.08)
    assert compute.traced_seconds(run, plain, twice) > 1.7 * measured_s
    least_s, most_s = (
        compute.traced_seconds(run, plain, each(run, probed))
        for each in (time_range.fastest, time_range.slowest)
    )
    assert least_s < measured_s < most_s


BUDGET = Mode(
    recompute=Recompute(), activation_engine=ActivationEngine.OWN_BUDGET, removed=0.625, recomputed=0.375
)
LAYERS = Mode(recompute=Recompute(), activation_engine=ActivationEngine.OWN_LAYERS, layers=36)


def hooks_s(sequences: int, length: int, mode: Mode, launch_s: float = 25e-6) -> float:
    """Time of hooks of saved tensors in a step of Qwen3-4B on one H200."""
    run = run_of(Row("qwen3-4b", sequences, length, mode, 0))
    h200 = machine.known("h200", ranks_on_node=1)._replace(launch_s=launch_s)
    found = memory.estimate(run, mode)
    pace = compute.pace(run, h200, found.parameters.shard)
    costs = step_time.estimate(run, mode, found, h200, pace).costs
    return sum(cost.exposed_s for cost in costs if cost.name == "hooks of saved tensors")


def test_hooks_of_saved_tensors_lengthen_a_step_of_few_tokens() -> None:
    budget_s = hooks_s(1, 2048, BUDGET)
    assert 0 < hooks_s(1, 2048, LAYERS) < budget_s
    assert hooks_s(1, 2048, BUDGET, 50e-6) > 2 * budget_s
    assert hooks_s(1, 2048, BUDGET._replace(recomputed=0.0)) < 0.5 * budget_s
    assert hooks_s(4, 4096, BUDGET) == 0
    assert hooks_s(1, 2048, Mode(recompute=CHECKPOINTS)) == 0


def budget(states: float, offloaded: float, recomputed: float) -> Mode:
    return off(states)._replace(
        streamed_fraction=0.85 * states,
        recompute=Recompute(),
        activation_engine=ActivationEngine.OWN_BUDGET,
        removed=offloaded + recomputed,
        recomputed=recomputed,
    )


# The fourth steps on one H200, of the same forms as the planner chose.
BUDGETS = {
    "qwen3-4b": Row("qwen3-4b", 1, 4096, budget(0.57, 0.22, 0.66), 0, gpu="h200", step_s=1.019),
    "qwen3-4b, 4 sequences": Row("qwen3-4b", 4, 4096, budget(0.31, 0.22, 0.66), 0, gpu="h200", step_s=3.871),
    "qwen3-8b": Row("qwen3-8b", 1, 2048, budget(0.91, 0.25, 0.25), 0, gpu="h200", step_s=1.784),
    "mistral-7b": Row("mistral-7b", 1, 4096, budget(0.87, 0.27, 0.35), 0, gpu="h200", step_s=1.706),
    "gemma-3-4b": Row("gemma-3-4b", 1, 2048, budget(0.53, 0.22, 0.66), 0, gpu="h200", step_s=0.916),
}


def test_an_activation_budget_takes_about_what_it_has_taken_of_real_models() -> None:
    found = {name: span(row, machine.known("h200", ranks_on_node=1)) for name, row in BUDGETS.items()}
    assert all(least_s < BUDGETS[name].step_s < most_s for name, (_, least_s, most_s) in found.items()), found
    errors = [abs(BUDGETS[name].step_s / step_s - 1) for name, (step_s, _, _) in found.items()]
    assert statistics.median(errors) < 0.15


@pytest.mark.parametrize(
    ("model", "length", "recompute", "traced_gib"),
    [
        ("qwen3-4b", 2048, None, 13.19),
        ("qwen3-4b", 4096, CHECKPOINTS, 2.25),
        ("llama-3-8b", 2048, CHECKPOINTS, 2.54),
        ("llama-3-8b", 8192, CHECKPOINTS, 4.27),
    ],
)
def test_a_fused_loss_takes_at_least_what_a_trace_of_torchs_takes(
    model: str, length: int, recompute: Recompute | None, traced_gib: float
) -> None:
    """Bytes of forward and backward beyond weights and states; `linear_cross_entropy` of torch 2.13 was traced."""
    mode = off(1.0, recompute)._replace(streamed_fraction=0.0)
    run = run_of(Row(model, 1, length, mode, 0))._replace(fused_loss=True)
    alive = (line for line in memory.estimate(run, mode).gpu if line.when in {"step", "loss", "backward"})
    assert traced_gib <= sum(line.bytes for line in alive) / GIB <= traced_gib + 1
