# SPDX-License-Identifier: Apache-2.0
"""The common part of `plan` and `diagnose`: the arguments that describe a run, and the plan made from them."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from offload_arithmetic.sizes import HEADROOM
from skill_tools.commands import plan_inputs, releases
from skill_tools.configs.config import Config
from skill_tools.configs.releases import Stated
from skill_tools.configs.source import looks_like_configuration
from skill_tools.dialects import registry
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.candidates import MECHANISMS
from skill_tools.dialects.run import TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput
from skill_tools.planning import unread_values
from skill_tools.planning.cost import machine
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import known_models, local_models, memory, shape_sources, traces
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.model.shape_sources import UnknownShapeError
from skill_tools.planning.search import planner
from skill_tools.planning.search.legality import with_settings
from skill_tools.planning.search.options import Budget, Prepared
from skill_tools.planning.search.planner import Plan
from skill_tools.planning.search.restriction import FAMILIES, Restriction, named
from skill_tools.rules.versions import resolve
from skill_tools.started import COMMAND
from skill_tools.units import gib, is_bare_number, parse_bytes, seconds

_MOST_GPUS = 1_000_000
_LONGEST_STEP_S = 86_400.0
AUTO = "auto"
# torch's sdp_utils.cpp: neither flash nor memory-efficient attention takes bf16 before compute capability 8.0.
_NO_BF16 = (
    "fp16 with a loss scale, since the {} has no bf16: given bf16, torch emulates it and its attention stores all "
    "scores, which no line of this plan counts"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of budgets and machine, and of sizes that the configuration does not state."""
    # `diagnose` changes both: a log's host is not the usual one of its GPU, and a log gives its card's
    # capacity.
    parser.set_defaults(takes_host_of_gpu=True, gpu_capacity_bytes=None)
    budgets = parser.add_argument_group("budgets and machine")
    budgets.add_argument("--gpu-memory", metavar="AMOUNT", help="memory budget per GPU, for example 80GiB")
    budgets.add_argument(
        "--tensor-memory",
        metavar="AMOUNT",
        help="a GPU's memory for tensors, in place of --gpu-memory: nothing is set aside for CUDA and headroom",
    )
    budgets.add_argument(
        "--gradients-at-once",
        action="store_true",
        help="no gradient waits for its copy to the host, as on the CPU twin with its synchronous copies",
    )
    budgets.add_argument("--host-memory", metavar="AMOUNT", help="host memory budget per node")
    budgets.add_argument(
        "--pinned-memory",
        metavar="AMOUNT",
        help="the part of a node's host memory that may be page-locked; as `offload probe` found it, else all",
    )
    budgets.add_argument("--gpus", type=int, metavar="N", help="GPUs in the whole run")
    budgets.add_argument(
        "--gpu",
        metavar="NAME",
        help="a GPU as you or nvidia-smi call it: 4090, A100-40GB, MI300X; four numbers; or auto: this "
        "machine's, as probed, or as torch finds it",
    )
    budgets.add_argument("--profile", metavar="FILE", help="rates that `offload probe` measured, as JSON")
    budgets.add_argument(
        "--step-time", type=float, metavar="SECONDS", help="measured time of a step without offload"
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--model",
        metavar="NAME",
        help="a known model, for example qwen3-30b-a3b; `offload plan --list-models` prints all",
    )
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="the model's profile from `offload trace`, which names the model too; many known models have one",
    )
    run.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="MECHANISM",
        help=f"search no other mechanism; repeatable, or with commas; {', '.join(FAMILIES)}, or one of --without's",
    )
    run.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="MECHANISM",
        help=f"leave a mechanism out of the search; repeatable, or with commas; {', '.join(FAMILIES)}, or one of "
        f"{', '.join(MECHANISMS)}",
    )
    run.add_argument(
        "--allow-other-numerics",
        action="store_true",
        help="also plans that round optimizer states, named as such; without it every plan is exact",
    )
    run.add_argument(
        "--framework",
        choices=registry.names(),
        metavar="NAME",
        help=f"needed if the input does not show it; one of {', '.join(registry.names())}",
    )
    run.add_argument(
        "--overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings on top of the files; give files before this option",
    )
    run.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="plan with one more override, and compare with the plan without it; repeatable",
    )
    run.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME==RELEASE",
        help="a release, such as megatron-core==0.16.1",
    )
    run.add_argument("--versions", metavar="FILE", help="output of pip list or pip freeze")


def check(args: argparse.Namespace) -> None:
    """Raise `UnusableInput` for releases of nothing known and for a file that --overrides took."""
    releases.check(args.target)
    for word in args.overrides:
        if _is_file(word):
            raise UnusableInput(
                f"--overrides took the file {word!r}",
                expected="KEY=VALUE after --overrides",
                attempt="putting files before --overrides",
            )


def check_gpus(args: argparse.Namespace) -> None:
    """Raise `UnusableInput` for a number of GPUs that cannot be."""
    if args.gpus is not None and not 1 <= args.gpus <= _MOST_GPUS:
        raise UnusableInput(f"--gpus {args.gpus}", expected=f"1 to {_MOST_GPUS}", attempt="--gpus 8")


def _is_file(word: str) -> bool:
    """Return whether `word` names a file: --overrides takes every word up to the next option."""
    if "=" in word or word.startswith(("-", "~", "+")):
        return False
    return looks_like_configuration(word) or os.path.isfile(word)


class Predicted(NamedTuple):
    """The memory of the run as it stands, and the budget that it is asked to keep."""

    memory: Memory
    budget: Budget


def predict(args: argparse.Namespace, inputs: Sequence[str]) -> Predicted:
    """Return the memory of the run as it stands, without a search: a plan's `as_it_is` says the same."""
    asked = _asked(args, inputs, what_if=args.what_if)
    (built, _, budget), _ = asked.prepare(asked.config, None)
    mode = registry.named(built.dialect).current(asked.config, built)
    return Predicted(memory.estimate(built, mode), budget)


def make_plan(args: argparse.Namespace, inputs: Sequence[str]) -> Plan:
    """Return the plan for parsed arguments and the files `inputs`."""
    plan = _plan(args, inputs, what_if=args.what_if)
    if not args.what_if:
        return plan
    before = _plan(args, inputs, what_if=())
    return plan._replace(sensitivity=(_without_what_if(before, plan), *plan.sensitivity))


def _release_notes(stated: Mapping[str, Stated], config: Config) -> Iterator[Assumption]:
    """Yield a note for each release assumed by the rules and missing on the command line."""
    for name, each in releases.that_matter(stated, config).items():
        if each.where != "--target":
            yield Assumption(f"release: {name} {each.version} ({each.where}); --target names another")


def _without_what_if(before: Plan, plan: Plan) -> tuple[str, str]:
    """Return the recommendation without the what-if, for comparison."""
    best, now = before.recommendation, plan.recommendation
    if best is None:
        return "without the what-if", "nothing legal fits"
    needs = (
        f"{best.candidate.label}, {gib(best.memory.device_bytes)} a GPU, {seconds(best.time.total_s)} a step"
    )
    return (
        "without the what-if",
        f"{needs}{' (the same mode)' if now and now.candidate.mode == best.candidate.mode else ''}",
    )


class _Asked(NamedTuple):
    """The run to plan: its configuration, from `files`, and its model, from `shape_source`."""

    args: argparse.Namespace
    files: Sequence[str]
    config: Config
    shape: ModelShape
    shape_source: str
    by_trace: bool

    def prepare(self, config: Config, gpus: int | None) -> tuple[Prepared, tuple[Assumption, ...]]:
        """Return the run of `config`, its machine and its budget, and notes on sizes that nobody has stated."""
        args = self.args
        asked = _run(args, self.files, config, self.shape, gpus=gpus or args.gpus)
        built = _traced(args, asked, names_the_model=self.by_trace)
        built = built._replace(
            reserves=args.tensor_memory is None,
            gradients_wait=not args.gradients_at_once,
            allows_other_numerics=args.allow_other_numerics,
        )
        where = machine_of(args, built.layout.ranks_on_node)
        budget, notes = budget_of(args, where)
        if kept := registry.named(config.framework).kept_by_engines(config):
            left = int(budget.gpu_bytes * (1 - kept))
            notes = (
                *notes,
                Assumption(
                    f"rollout engines keep {kept:.0%} of each GPU, which leaves the trainer {gib(left)}",
                    About.LAYOUT,
                ),
            )
            budget = budget._replace(gpu_bytes=left)
        return Prepared(built, where, budget), notes


def _asked(args: argparse.Namespace, inputs: Sequence[str], *, what_if: Sequence[str]) -> _Asked:
    inputs = [local_models.in_folder(path) if os.path.isdir(path) else path for path in inputs]
    jsons = [path for path in inputs if shape_sources.is_config_json(path)]
    files = [path for path in inputs if path not in jsons]
    config = plan_inputs.read_to_plan(args, files, what_if)
    if refusal := registry.named(plan_inputs.stated(args, files) or config.framework).refusal(config):
        raise refusal
    by_trace = bool(args.trace and not (args.model or inputs))
    if by_trace:
        shape, source = traces.shape_in(args.trace)
    else:
        shape, source = _shape(config, args.model, jsons[0] if jsons else None)
    return _Asked(args, files, config, shape, source, by_trace)


def _plan(args: argparse.Namespace, inputs: Sequence[str], *, what_if: Sequence[str]) -> Plan:
    asked = _asked(args, inputs, what_if=what_if)
    config = asked.config
    stated = releases.of_run(args, config, asked.files)
    config = config._replace(versions=resolve({name: each.version for name, each in stated.items()}))
    plan = _searched(asked, config, stated)
    if question := registry.named(config.framework).question(config):
        answers = tuple(
            (label, _searched(asked, with_settings(config, settings), stated))
            for label, settings in question.answers.items()
        )
        plan = plan._replace(question=(question.text, answers))
    if plan.recommendation is not None:
        return plan
    from skill_tools.planning.search.ways_to_fit import Finder

    finder = Finder(
        config,
        lambda config, gpus: asked.prepare(config, gpus)[0],
        config.versions,
        plan.search.judged,
        _restriction(args),
    )
    return plan._replace(ways=finder.three_cheapest(plan.run))


def _searched(asked: _Asked, config: Config, stated: Mapping[str, Stated]) -> Plan:
    """Return the plan for `config`, without the ways that fit by other means."""
    args = asked.args
    (built, where, budget), notes = asked.prepare(config, None)
    return planner.make_plan(
        config,
        built._replace(
            assumptions=(*notes, *_release_notes(stated, config), *_of_files(config), *built.assumptions)
        ),
        where,
        budget,
        shape_source=asked.shape_source,
        versions=config.versions,
        measured_step_s=_positive_time(args.step_time),
        restriction=_restriction(args),
    )


def _restriction(args: argparse.Namespace) -> Restriction:
    return Restriction(named(args.only, "--only"), named(args.without, "--without"))


def _shape(config: Config, model: str | None, config_json: str | None) -> tuple[ModelShape, str]:
    """Return the shape and its source; the error for a missing or unknown name says how to list all names."""
    try:
        return shape_sources.shape_of(config, model=model, config_json=config_json)
    except UnusableInput as error:
        unnamed = isinstance(error, UnknownShapeError)
        if not unnamed and (model is None or known_models.find(model) is not None):
            raise
        attempt = f"{error.attempt}; `{COMMAND} plan --list-models` prints the known models"
        raise type(error)(error.problem, expected=error.expected, attempt=attempt) from None


def _run(
    args: argparse.Namespace, files: Sequence[str], config: Config, shape: ModelShape, *, gpus: int | None
) -> TrainingRun:
    check_gpus(args)
    dialect = registry.named(plan_inputs.stated(args, files) or config.framework)
    if dialect.no_plan:  # nor has the one whose settings it reads
        raise dialect.not_planned()
    return unread_values.run_of(dialect, config, shape, gpus=gpus)


def _traced(args: argparse.Namespace, built: TrainingRun, *, names_the_model: bool) -> TrainingRun:
    """Return the run with its model's profile: the user's, or a shipped one if it describes the run."""
    if args.trace:
        return traces.run_of(args.trace, built, names_the_model=names_the_model)
    return traces.with_what_ships(built)


def machine_of(args: argparse.Namespace, ranks: int) -> Machine:
    """Return the machine named by the arguments, or this one; `ranks` of the run are on one of its nodes."""
    if args.profile:
        return machine.read_profile(args.profile, ranks=ranks)
    if args.gpu not in {None, AUTO}:
        return machine.known(args.gpu, ranks_on_node=ranks)
    from skill_tools.planning.cost import kept_profile, unnamed_gpu

    capacity = args.gpu_capacity_bytes
    kept = kept_profile.find(ranks=ranks)
    if kept is not None and (capacity is None or _is_card_of(kept, capacity)):
        return kept
    if args.gpu == AUTO:
        return _present(ranks)
    said = args.gpu_memory or args.tensor_memory
    budget = None if said is None else parse_bytes(said, option="--gpu-memory")
    found = unnamed_gpu.standing_for(
        capacity or budget, is_capacity=capacity is not None, ranks_on_node=ranks
    )
    return found._replace(host_memory_bytes=0)  # that of another machine


def _is_card_of(kept: Machine, capacity_bytes: int) -> bool:
    """Return whether a log's card, of `capacity_bytes`, may be that of this machine's kept profile."""
    from skill_tools.planning.cost.unnamed_gpu import label_gb

    return not kept.gpu_memory_bytes or label_gb(kept.gpu_memory_bytes) == label_gb(capacity_bytes)


def _present(ranks: int) -> Machine:
    """Return the known machine with torch's card here, less the card's memory held by other processes."""
    from skill_tools.commands.verify import chosen_device
    from skill_tools.planning.cost import kept_profile

    try:
        device = chosen_device(None)
    except UnusableInput:  # no torch
        device = None
    if device is None or not device.is_accelerator:
        raise UnusableInput(
            "--gpu auto: nobody has measured this machine, and torch finds no GPU",
            expected=f"its profile in {kept_profile.path()}, or its card",
            attempt=f"{COMMAND} probe, once, or --gpu NAME",
        )
    known = machine.known(device.name, ranks_on_node=ranks)
    total = device.allocator.total_bytes
    # To ask takes a context of our own, which a plan counts by itself.
    others = max(total - device.allocator.free_bytes() - memory.CONTEXT_BYTES, 0)
    return known._replace(
        gpu_memory_bytes=max(min(known.gpu_memory_bytes, total) - others, 0),
        host_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _unnamed(args: argparse.Namespace, where: Machine) -> str:
    """Return a note on the rates that stand for an unnamed GPU."""
    if not where.measured and args.gpu == AUTO:
        taken = machine.known(where.name).gpu_memory_bytes - where.gpu_memory_bytes
        return (
            f"GPU: {where.name}, this machine's, less {gib(taken)} held by others; `{COMMAND} probe`, run once, keeps "
            "this machine's rates"
        )
    if where.stands_for:
        cards = ", ".join(where.stands_for)
        keeps = f"`{COMMAND} probe`, run once, keeps this machine's"
        return f"GPU: not named, so its rates may be those of {cards}; {keeps}"
    from skill_tools.planning.cost import kept_profile

    days = kept_profile.age_days()
    age = (
        ""
        if days is None or days <= kept_profile.OLD_DAYS
        else f"; {days} days old, {COMMAND} probe measures again"
    )
    return f"GPU: this machine, as `{COMMAND} probe` measured it{age}"


def _of_files(config: Config) -> Iterator[Assumption]:
    """Yield an assumption for each missing or unread file, and for each override that counts for nothing."""
    for note in config.missing_file_notes():
        yield Assumption(note, About.MISSING_FILE, "give that file")
    for note in config.unread_file_notes():
        yield Assumption(note, About.UNREAD_FILE)
    yield from plan_inputs.not_counted(config)


def budget_of(args: argparse.Namespace, where: Machine) -> tuple[Budget, tuple[Assumption, ...]]:
    """Return the run's memory budget on `where`, and notes on amounts that nobody has stated."""
    notes = []
    if args.gpu in {None, AUTO} and not args.profile:
        notes.append(Assumption(_unnamed(args, where), About.MACHINE))
    if not where.has_bf16:
        notes.append(Assumption(_NO_BF16.format(where.name), About.MACHINE))
    if args.gpu_memory is not None and args.tensor_memory is not None:
        raise UnusableInput(
            "--gpu-memory and --tensor-memory are both given",
            expected="one of them",
            attempt="--tensor-memory alone, which leaves CUDA's context and headroom to you",
        )
    if args.tensor_memory is not None:
        gpu_bytes = parse_bytes(args.tensor_memory, option="--tensor-memory")
    elif args.gpu_memory is None:
        if not where.gpu_memory_bytes:
            raise UnusableInput(
                "no GPU memory is given",
                expected="the budget of one GPU",
                attempt="--gpu-memory 80GiB, or --gpu NAME",
            )
        gpu_bytes = where.gpu_memory_bytes
        notes.append(Assumption(f"budget: the {gib(gpu_bytes)} of one {where.name}"))
    else:
        gpu_bytes = parse_bytes(args.gpu_memory, option="--gpu-memory")
        if is_bare_number(args.gpu_memory):
            notes.append(Assumption(f"--gpu-memory {args.gpu_memory} read as GiB"))
    host_bytes = where.host_memory_bytes or None if args.takes_host_of_gpu else None
    if args.host_memory is not None:
        host_bytes = parse_bytes(args.host_memory, option="--host-memory")
    elif host_bytes:
        whose = "this machine's" if args.gpu == AUTO else f"this run's share of the {where.name}'s machine"
        said = f"host memory: {gib(host_bytes)} a node, {whose}; --host-memory with yours"
        notes.append(Assumption(said, About.HOST_MEMORY))
    pinned_bytes = where.pinned_memory_bytes or None
    if args.pinned_memory is not None:
        pinned_bytes = parse_bytes(args.pinned_memory, option="--pinned-memory")
    elif pinned_bytes:
        said = f"pinned memory: {gib(pinned_bytes)}, where this machine refused more; --pinned-memory"
        notes.append(Assumption(said))
    headroom = HEADROOM if args.tensor_memory is None else 0.0
    assumed = bool(where.stands_for) and args.gpu_memory is None and args.tensor_memory is None
    of_usual_machine = (
        args.host_memory is None and bool(host_bytes) and args.gpu != AUTO and not where.measured
    )
    return Budget(gpu_bytes, host_bytes, headroom, pinned_bytes, assumed, of_usual_machine), tuple(notes)


def _positive_time(measured_s: float | None) -> float | None:
    if measured_s is not None and not 0 < measured_s < _LONGEST_STEP_S:
        raise UnusableInput(
            f"--step-time {measured_s:g}",
            expected="seconds above zero, and less than a day",
            attempt="--step-time 0.996",
        )
    return measured_s
