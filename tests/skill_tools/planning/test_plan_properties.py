# SPDX-License-Identifier: Apache-2.0
"""Properties of any run's plan: budgets are respected, more budget is never slower, units never mix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_arithmetic.sizes import HEADROOM
from skill_tools.configs.config import Config, Place, Setting
from skill_tools.dialects import layout
from skill_tools.dialects.megatron import run as megatron_run
from skill_tools.dialects.pytorch import candidates
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import (
    ActivationEngine,
    Mode,
    OptimizerEngine,
    Recompute,
    StreamedStates,
    WeightEngine,
)
from skill_tools.planning.cost import compute, machine, optimizer, step_time
from skill_tools.planning.model import activations, known_models, memory, states
from skill_tools.planning.model.memory import estimate
from skill_tools.planning.search import planner
from skill_tools.planning.search.legality import with_settings
from skill_tools.planning.search.options import Budget
from skill_tools.planning.search.planner import Plan
from skill_tools.rules.lint import lint
from skill_tools.units import GB, GIB, parse_bytes

MODELS = st.sampled_from(
    ["llama-3.2-1b", "qwen3-8b", "llama-3-70b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-12b"]
)
BUDGETS_GIB = st.integers(min_value=8, max_value=200)
VERSIONS = {"megatron-core": "0.19.0", "transformer-engine": "2.10"}


def config(**values: object) -> Config:
    settings_ = {key: Setting(key, value, key, Place("run.yaml", 1, 1)) for key, value in values.items()}
    return Config("megatron-bridge", settings_, complete=False)


def bridge_config(tensor: int, pipeline: int, batch: int, recompute: str | None) -> Config:
    return config(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_tensor_parallel_size=1,
        micro_batch_size=1,
        global_batch_size=batch,
        seq_length=4096,
        recompute_granularity=recompute,
        cuda_graph_impl="none",
    )


def plan(given_config: Config, model: str, budget: Budget, *, pytorch: bool = False) -> Plan:
    shape = known_models.shape(model)
    if pytorch:
        given_config = with_settings(given_config, {"recompute_granularity": None})
    build = pytorch_run.build if pytorch else megatron_run.build
    run = build(given_config, shape, gpus=None)
    return planner.make_plan(
        given_config, run, machine.known("h100"), budget, shape_source="", versions=VERSIONS
    )


runs = st.builds(
    bridge_config,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([16, 64]),
    recompute=st.sampled_from([None, "selective", "full"]),
)


modes = st.builds(
    Mode,
    optimizer_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    streamed_fraction=st.sampled_from([0.0, 0.5]),
    optimizer_engine=st.sampled_from(OptimizerEngine),
    moves_masters=st.booleans(),
    state_offload=st.booleans(),
    activation_engine=st.sampled_from(ActivationEngine),
    layers=st.integers(min_value=0, max_value=8),
    modules=st.sampled_from([(), ("core_attn", "attn_proj")]),
    removed=st.sampled_from([0.0, 0.5]),
    recomputed=st.sampled_from([0.0, 0.25]),
    recompute=st.sampled_from([None, Recompute(), Recompute(granularity="full")]),
    weight_layers=st.integers(min_value=0, max_value=8),
    weight_engine=st.sampled_from(WeightEngine),
    resident_layers=st.integers(min_value=0, max_value=8),
    states_resident=st.sampled_from([0.0, 0.25]),
    states_on_cpu=st.sampled_from([0.0, 0.25]),
    slices=st.sampled_from([1, 2, 8]),
    offload_parameters=st.booleans(),
)


@given(modes, st.booleans())
def test_states_and_activations_see_their_own_half_of_a_mode(mode: Mode, adapts: bool) -> None:
    overrides = config(lora_rank=16) if adapts else config()
    run = pytorch_run.build(overrides, known_models.shape("llama-3.2-1b"), gpus=1)
    (stage,) = layout.stages(run.shape, run.layout)
    local = layout.local_parameters(run.shape, run.layout, stage, sharded=False)
    assert states.lines(run, mode, local) == states.lines(run, mode.of_states, local)
    assert activations.kept_by_stage(run, mode, stage) == activations.kept_by_stage(
        run, mode.of_activations, stage
    )


@given(modes, st.booleans())
def test_no_number_depends_on_a_printed_name(mode: Mode, adapts: bool) -> None:
    run = pytorch_run.build(
        config(lora_rank=16) if adapts else config(), known_models.shape("llama-3.2-1b"), gpus=1
    )
    found, h100 = estimate(run, mode), machine.known("h100")
    renamed = found._replace(
        gpu=tuple(line._replace(name="-") for line in found.gpu),
        host=tuple(line._replace(name="-") for line in found.host),
    )
    speed = compute.pace(run, h100, found.parameters.shard)
    times = [step_time.estimate(run, mode, each, h100, speed) for each in (found, renamed)]
    assert times[0] == times[1]
    assert states.pinned_bytes(run, mode, found.host) == states.pinned_bytes(run, mode, renamed.host)


@settings(max_examples=15)
@given(runs, MODELS, BUDGETS_GIB, st.integers(min_value=0, max_value=2000), st.booleans())
def test_the_recommendation_respects_both_budgets(
    given_config: Config, model: str, gpu_gib: int, host_gib: int, pytorch: bool
) -> None:
    budget = Budget(gpu_gib * GIB, host_gib * GIB)
    found = plan(given_config, model, budget, pytorch=pytorch)
    if found.recommendation is not None:
        memory = found.recommendation.memory
        assert memory.device_bytes <= 0.95 * budget.gpu_bytes
        assert memory.host_bytes_per_node <= 0.95 * host_gib * GIB
    else:
        assert found.floor.memory.device_bytes > budget.most_gpu_bytes or host_gib < 2000


@settings(max_examples=15)
@given(runs, MODELS, BUDGETS_GIB, st.integers(min_value=0, max_value=500), st.booleans())
def test_the_search_for_what_fits_finds_what_the_whole_search_does(
    given_config: Config, model: str, gpu_gib: int, host_gib: int, pytorch: bool
) -> None:
    budget = Budget(gpu_gib * GIB, host_gib * GIB)
    search = plan(given_config, model, budget, pytorch=pytorch).search
    assert search.fitting(budget) == [option for option in search.options(budget) if option.fits]


@settings(max_examples=15)
@given(runs, MODELS, BUDGETS_GIB, st.integers(min_value=0, max_value=40), st.booleans())
def test_more_budget_is_never_slower(
    given_config: Config, model: str, gpu_gib: int, more_gib: int, pytorch: bool
) -> None:
    small = plan(given_config, model, Budget(gpu_gib * GIB, None), pytorch=pytorch).recommendation
    large = plan(
        given_config, model, Budget((gpu_gib + more_gib) * GIB, None), pytorch=pytorch
    ).recommendation
    if small is not None:
        assert large is not None
        assert large.time.total_s <= small.time.total_s * (1 + 1e-9)


@settings(max_examples=15)
@given(runs, MODELS, BUDGETS_GIB)
def test_a_recommended_patch_breaks_no_rule_of_its_own(
    given_config: Config, model: str, gpu_gib: int
) -> None:
    found = plan(given_config, model, Budget(gpu_gib * GIB, None))
    if found.recommendation is None:
        return
    before = {
        finding.rule
        for finding in lint(given_config, versions=VERSIONS).findings
        if finding.severity == "error"
    }
    after = lint(with_settings(given_config, found.recommendation.candidate.settings), versions=VERSIONS)
    assert {finding.rule for finding in after.findings if finding.severity == "error"} <= before


@given(MODELS, st.floats(0, 1), st.floats(0, 1))
def test_more_memory_saved_by_the_optimizer_never_costs_less_host_memory(
    model: str, one: float, other: float
) -> None:
    run = megatron_run.build(config(), known_models.shape(model), gpus=8)
    low, high = sorted((one, other))
    less, more = (estimate(run, Mode(optimizer_fraction=fraction)) for fraction in (low, high))
    assert more.between_steps_bytes <= less.between_steps_bytes
    assert more.host_bytes_per_node >= less.host_bytes_per_node
    saved = less.between_steps_bytes - more.between_steps_bytes
    spent = (more.host_bytes_per_node - less.host_bytes_per_node) / run.layout.ranks_on_node
    # Moments alone move; 16 B a parameter wait on the host, 8 of them in pinned blocks of up to twice their size.
    assert saved * 16 / 8 - 64 <= spent <= saved * 24 / 8 + 64


@given(st.floats(0.1, 500, allow_nan=False), st.sampled_from(["GiB", "GB", "MiB", "TB"]))
def test_units_never_mix(amount: float, unit: str) -> None:
    text = f"{amount:.3f}"
    factor = {"GiB": GIB, "GB": GB, "MiB": 1 << 20, "TB": 10**12}[unit]
    assert parse_bytes(f"{text}{unit}", option="--gpu-memory") == round(float(text) * factor)


rates = st.floats(1e9, 1e12)


@settings(max_examples=40)
@given(rates, rates, rates, st.floats(0, 1), st.sampled_from(StreamedStates))
def test_the_streamed_share_is_the_best_there_is(
    link: float, dram: float, cpu: float, share: float, states: StreamedStates
) -> None:
    host = machine.known("h100")._replace(update_link=link, update_dram=dram, update_cpu=cpu / 28)
    best = optimizer.best_streamed_share(host, states)
    least = optimizer.update_seconds(1 - best, best, host, states)
    assert least <= optimizer.update_seconds(1 - share, share, host, states) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("states", "bytes_each"), [("exact", 10), ("packed", 6), ("compact-16", 4.0625), ("compact-8", 3.0625)]
)
def test_states_in_fewer_bits_are_planned_where_they_are_asked_for(states: str, bytes_each: float) -> None:
    given_config = config(seq_length=2048, micro_batch_size=1, streamed_states=states)
    run = pytorch_run.build(given_config, known_models.shape("llama-3.2-1b"), gpus=None)
    arguments = {"streamed_fraction": 1.0, "optimizer_engine": OptimizerEngine.REFERENCE}
    mode = Mode(optimizer_fraction=1.0, streamed_states=run.streamed_states, **arguments)  # type: ignore[arg-type]
    found = estimate(run, mode)
    (line,) = found.host
    assert line.bytes == pytest.approx(bytes_each * found.parameters.shard, abs=1)
    slots = next(line for line in found.gpu if line.name == "streaming slots")
    # A chunk's gradients and masters in fp32, and its weights.
    scratch = 10 * (96 * 2**20 // 10) if states == "exact" else 0
    assert slots.bytes == pytest.approx(3 * 96 * 2**20 + scratch, rel=1e-6)
    plan = planner.make_plan(
        given_config, run, machine.known("h100"), Budget(16 * GIB, None), shape_source="", versions={}
    )
    assert plan.recommendation is not None
    chosen = plan.recommendation.candidate.mode
    assert chosen.streamed_states == states
    section = candidates.execute(chosen, run, 0)["optimizer"]
    assert isinstance(section, dict)
    assert section.get("streamed_states", "exact") == states


def test_a_host_with_little_memory_streams_what_the_cpu_would_need_more_for() -> None:
    given_config = config(seq_length=2048, micro_batch_size=1, recompute_granularity="full")
    run = pytorch_run.build(given_config, known_models.shape("llama-3.2-1b"), gpus=None)
    shard = estimate(run).parameters.shard
    slow_link = machine.known("h100")._replace(update_link=10e9)
    least = estimate(
        run, Mode(optimizer_fraction=1.0, streamed_fraction=1.0, optimizer_engine=OptimizerEngine.REFERENCE)
    )
    gpu_bytes = round((least.device_bytes + shard // 2) / (1 - HEADROOM))

    def chosen(host_bytes: int) -> Mode:
        found = planner.make_plan(
            given_config, run, slow_link, Budget(gpu_bytes, host_bytes), shape_source="", versions={}
        ).recommendation
        assert found is not None
        assert found.memory.host_bytes_per_node <= host_bytes
        return found.candidate.mode

    # The GPU keeps next to nothing, so nearly all elements need 14 bytes on the CPU, or 10 where they stream.
    ample = chosen(round(16 * shard / (1 - HEADROOM)))
    assert ample.streamed_fraction < ample.optimizer_fraction / 2
    tight = chosen(round(10.2 * shard / (1 - HEADROOM)))
    assert tight.streamed_fraction == tight.optimizer_fraction


def test_what_a_plan_sets_is_known_of_then() -> None:
    """If something unseen may set a key, a plan that sets it is judged with its value."""
    key = "optimizer_offload_fraction"
    laid = with_settings(config()._replace(maybe_set=frozenset({key})), {key: 0.5})
    assert laid.value(key) == 0.5
    assert not laid.maybe_set


@given(st.integers(1, 60), st.sampled_from([1, 2, 3, 8, 16]), st.booleans())
def test_stages_that_are_alike_need_no_estimate_each(layers: int, pipeline: int, moe: bool) -> None:
    """Of them the first has the most micro-batches in flight."""
    shape = known_models.shape("deepseek-v2-lite" if moe else "llama-3.2-1b")._replace(num_layers=layers)
    run = megatron_run.build(config(pipeline_model_parallel_size=pipeline), shape, gpus=pipeline)
    every = [memory._of_stage(run, Mode(), stage) for stage in layout.stages(run.shape, run.layout)]
    found = estimate(run)
    assert found.device_bytes == max(each.device_bytes for each in every)
    assert found.host_bytes_per_node == max(each.host_bytes_per_node for each in every)


@pytest.mark.parametrize(
    ("streamed", "micro_batches", "waiting"),
    [(0.0, 1, 2 * 151936 * 4096), (0.7, 1, 512 << 20), (0.99, 1, 0.01 * 2), (1.0, 1, 0), (0.0, 2, 0)],
    ids=["the embedding on the CPU", "a third on the CPU", "a hundredth", "streamed", "added up"],
)
def test_gradients_wait_for_their_copy_to_the_cpus_share(streamed, micro_batches, waiting):
    """At most 512 MiB, or one that is longer: the embedding's is the last of all."""
    run = pytorch_run.build(
        config(gradient_accumulation_steps=micro_batches), known_models.shape("qwen3-8b"), gpus=1
    )
    mode = Mode(
        optimizer_fraction=1.0,
        streamed_fraction=streamed,
        optimizer_engine=OptimizerEngine.REFERENCE,
        recompute=Recompute(granularity="full"),
    )
    found = estimate(run, mode)
    expected = waiting * found.parameters.total if 0 < waiting < 1 else waiting
    to_the_host = sum(
        line.bytes for line in states.lines(run, mode, found.parameters)[0] if "host" in line.name
    )
    assert to_the_host == pytest.approx(expected, rel=1e-3)
