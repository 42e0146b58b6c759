# SPDX-License-Identifier: Apache-2.0
"""The planner: from a run, a machine and budgets to a ranked answer.

It takes the fastest legal combination that fits, the best of each other kind, forbidden ones, and changes with another
answer. It neither reads files nor prints.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload_arithmetic.sizes import FORMULA_ERROR
from skill_tools.configs.config import Config
from skill_tools.dialects import registry
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.base import Dialect
from skill_tools.dialects.candidates import (
    ATTENTION,
    FINE_GRAINED,
    HEADS,
    INPUTS,
    LAYERS,
    NO_OFFLOAD,
    OPTIMIZER,
    SHARDED,
    STATES,
    TILES,
    TRAINED,
    WEIGHTS,
    Candidate,
    changed,
)
from skill_tools.dialects.levers import Kind
from skill_tools.dialects.patch import Patch
from skill_tools.dialects.run import ActivationEngine, Mode, TrainingRun
from skill_tools.planning.cost import compute
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.time_range import TimeRange, step_range
from skill_tools.planning.model import memory
from skill_tools.planning.search import reasons, sensitivity
from skill_tools.planning.search.candidates import Forbidden, Search
from skill_tools.planning.search.legality import LEGAL, Judge, RuledOut
from skill_tools.planning.search.options import HOST_MEMORY, PINNED_MEMORY, Budget, Option, Way
from skill_tools.planning.search.restriction import EVERYTHING, Restriction
from skill_tools.started import COMMAND

_ALTERNATIVES = 8
_LITTLE_MORE = 1.05  # half of a predicted step time's usual error


class Plan(NamedTuple):
    """The answer. `recommendation` is None when nothing legal fits; `floor` is then the smallest there is, `ways`
    fit by other means, `unrestricted` is the plan with the mechanisms that the user leaves out. `simpler` is
    an option with fewer mechanisms at nearly the same time, `search` answers for other budgets.

    `reasons` say why the recommendation has mechanisms for long sequences, `left` are the input's errors that stay with
    it.
    `ruled_out` pairs a mechanism's name with the rules against it, `sensitivity` a change with its answer. `question`
    is the question that the input leaves open, in words, and the plan for each answer to it; this plan is for the last.
    """

    run: TrainingRun
    shape_source: str
    machine: Machine
    budget: Budget
    as_it_is: Option
    without_offload: Option
    recommendation: Option | None
    patch: Patch | None
    simpler: Option | None
    simpler_patch: Patch | None
    floor: Option
    search: Search
    alternatives: tuple[Option, ...]
    ruled_out: tuple[tuple[str, tuple[RuledOut, ...]], ...]
    considered: int
    sensitivity: tuple[tuple[str, str], ...]
    assumptions: tuple[Assumption, ...]
    measured_step_s: float | None = None
    ways: tuple[Way, ...] = ()
    unrestricted: Option | None = None
    question: tuple[str, tuple[tuple[str, "Plan"], ...]] | None = None
    reasons: tuple[str, ...] = ()
    left: tuple[RuledOut, ...] = ()

    def time_range(self, option: Option) -> TimeRange:
        """Return the seconds between which a step of `option` lies, as far as the machine's rates are known."""
        return step_range(
            self.run,
            option.candidate.mode,
            option.memory,
            self.machine,
            measured_step_s=self.measured_step_s,
        )


def shown(plan: Plan) -> list[Option]:
    """Return the options that a reader compares: as it is, the recommendation and its alternatives, each mode once."""
    options = [plan.as_it_is, *([plan.recommendation] if plan.recommendation else []), *plan.alternatives]
    seen: dict[tuple[int, int, str], Option] = {}
    for option in options:
        key = (option.memory.device_bytes, round(option.time.total_s * 1e6), option.limit)
        seen.setdefault(key, option)
    return list(seen.values())


def make_plan(
    config: Config,
    run: TrainingRun,
    machine: Machine,
    budget: Budget,
    *,
    shape_source: str,
    versions: Mapping[str, str],
    measured_step_s: float | None = None,
    restriction: Restriction = EVERYTHING,
) -> Plan:
    """Return the plan for `run` on `machine` under `budget`, from the candidates that `restriction` lets through."""
    dialect = registry.named(run.dialect)
    shard = memory.estimate(run).parameters.shard
    speed = compute.pace(run, machine, shard, measured_step_s=measured_step_s)
    search = Search(config, dialect, run, machine, speed, versions=versions, restriction=restriction)
    options = search.options(budget)
    best = options[0] if options[0].fits else None
    unrestricted = None
    if best is None and search.left_out:
        everything = Search(config, dialect, run, machine, speed, versions=versions, judge=search.judged)
        unrestricted = next(iter(everything.fitting(budget)), None)
    simpler = _simpler(options) if best else None
    current = _as_it_is(dialect.current(config, run))
    return Plan(
        run=run,
        shape_source=shape_source,
        machine=machine,
        budget=budget,
        as_it_is=search.evaluate(current, search.judge_as_it_is(current), budget),
        without_offload=search.evaluate(Candidate(Mode(), NO_OFFLOAD, (), {}), LEGAL, budget),
        recommendation=best,
        patch=_patch(best, dialect, config, search.judged),
        simpler=simpler,
        simpler_patch=_patch(simpler, dialect, config, search.judged),
        floor=_floor(options),
        search=search,
        alternatives=_alternatives(options, best),
        ruled_out=_named(search.ruled_out),
        considered=search.considered,
        sensitivity=sensitivity.answers(
            run, machine, search, budget, options, lambda: _how_to_fuse(dialect, config, run)
        )
        if best
        else (),
        assumptions=(
            *_memory_from(run),
            *run.assumptions,
            *_assumed_of_experts(run),
            *map(Assumption, dialect.remarks(config, current.mode)),
            *map(Assumption, dialect.cautions(best.candidate.settings) if best else ()),
        ),
        measured_step_s=measured_step_s,
        unrestricted=unrestricted,
        reasons=tuple(
            reasons.of_sequences(best, lambda each: search.evaluate(each, best.legality, budget))
            if best
            else ()
        ),
        left=search.judged.left_by(best.candidate.settings) if best and dialect.has_files else (),
    )


def _patch(option: Option | None, dialect: Dialect, config: Config, judge: Judge) -> Patch | None:
    """Return the changes for `option`: those of its settings that the configuration does not have."""
    if option is None:
        return None
    return dialect.patch(changed(config, option.candidate.settings), config, dead=judge.dead_keys())


def _how_to_fuse(dialect: Dialect, config: Config, run: TrainingRun) -> str:
    """Return the switch of the run's framework that fuses head and loss, if it has one."""
    for lever in dialect.levers(config, run):
        if lever.kind is Kind.FUSED_LOSS:
            spelled = (f"{dialect.spelling(key)}={value}" for key, value in lever.settings.items())
            return lever.by_hand or ", ".join(spelled)
    return ""


def _floor(options: Sequence[Option]) -> Option:
    """Return the option nearest to fitting: by pinned or host memory if the GPU suffices, else by the GPU."""
    short_of_pinned = [option for option in options if option.limit == PINNED_MEMORY]
    if short_of_pinned:
        return min(short_of_pinned, key=lambda option: option.memory.pinned_bytes_per_node)
    short_of_host = [option for option in options if option.limit == HOST_MEMORY]
    if short_of_host:
        return min(short_of_host, key=lambda option: option.memory.host_bytes_per_node)
    return min(options, key=lambda option: option.memory.device_bytes)


def _simpler(options: Sequence[Option]) -> Option | None:
    """Return the fastest option with fewer mechanisms that costs little more time than the first of `options`."""
    best = options[0]
    fewer = (
        option
        for option in options
        if option.fits
        and len(option.candidate.mechanisms) < len(best.candidate.mechanisms)
        and option.time.total_s <= _LITTLE_MORE * best.time.total_s
    )
    return next(fewer, None)


def _memory_from(run: TrainingRun) -> tuple[Assumption, ...]:
    """Name the source of a plan's bytes of forward and backward, where there could be a trace."""
    if run.traced is not None:
        source = Assumption(f"memory and work of forward and backward: {run.traced.source}")
        positions = (run.traced.config or {}).get("max_position_embeddings")
        if not isinstance(positions, int) or positions >= run.seq_length:
            return (source,)
        beyond = (
            f"sequences of {run.seq_length} tokens: the model's config.json has {positions} positions; rotary "
            "embeddings run beyond them, a table of positions raises an index error"
        )
        return (source, Assumption(beyond))
    if run.is_eager and run.adapter is None:
        said = (
            f"memory of forward and backward: a formula, within {FORMULA_ERROR:.0%} of most Hugging Face models; "
            f"exact with `{COMMAND} trace config.json --out profile.json` and --trace profile.json"
        )
        return (Assumption(said, About.FORMULA),)
    return ()


def _assumed_of_experts(run: TrainingRun) -> tuple[Assumption, ...]:
    if not run.shape.experts:
        return ()
    return (Assumption("tokens spread evenly over the experts; an overloaded rank keeps more"),)


def _as_it_is(mode: Mode) -> Candidate:
    uses = {
        OPTIMIZER: mode.optimizer_fraction,
        LAYERS: mode.layers,
        STATES: mode.state_offload,
        FINE_GRAINED: mode.modules,
        INPUTS: mode.activation_engine in {ActivationEngine.INPUTS, ActivationEngine.ON_DEMAND},
        WEIGHTS: mode.weight_layers,
        TRAINED: mode.trained_layers,
        SHARDED: mode.offload_parameters,
        ATTENTION: mode.attention_layers,
        TILES: mode.tile_tokens,
        HEADS: mode.head_groups,
    }
    return Candidate(mode, "as it is", tuple(mechanism for mechanism, used in uses.items() if used), {})


def _alternatives(options: Sequence[Option], best: Option | None) -> tuple[Option, ...]:
    """Return the best of each other set of mechanisms: fitting ones first, then the nearest others."""
    near = sorted(
        (option for option in options if not option.fits), key=lambda option: option.memory.device_bytes
    )
    kinds: dict[tuple[str, ...], Option] = {}
    for option in (*(option for option in options if option.fits), *near):
        kinds.setdefault(option.candidate.mechanisms, option)
    others = [option for option in kinds.values() if option is not best]
    shown = [
        option for option in others if len(option.candidate.mechanisms) < 2 or not _beaten(option, options)
    ]
    return tuple(shown[:_ALTERNATIVES])


def _beaten(option: Option, others: Sequence[Option]) -> bool:
    """Whether another option is at least as good in time and both memories, and uses fewer mechanisms."""
    return any(
        other.time.total_s <= option.time.total_s
        and other.memory.device_bytes <= option.memory.device_bytes
        and other.memory.host_bytes_per_node <= option.memory.host_bytes_per_node
        and len(other.candidate.mechanisms) < len(option.candidate.mechanisms)
        for other in others
    )


def _named(forbidden: Sequence[Forbidden]) -> tuple[tuple[str, tuple[RuledOut, ...]], ...]:
    """Return each mechanism's name with the rules against it, once; the module set only where others are legal."""
    names = {
        OPTIMIZER: "optimizer offload",
        STATES: "optimizer-state offload",
        LAYERS: "layer-level activation offload",
        FINE_GRAINED: "fine-grained offload",
    }
    modules: dict[tuple[str, tuple[RuledOut, ...]], set[str]] = {}
    for each in forbidden:
        label = names.get(each.candidate.mechanisms[-1], each.candidate.label)
        modules.setdefault((label, each.reasons), set()).add(", ".join(each.candidate.mode.modules))
    return tuple(
        (f"{label} of {sets.pop()}" if len(sets) == 1 and any(sets) else label, reasons)
        for (label, reasons), sets in modules.items()
    )
