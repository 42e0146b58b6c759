# SPDX-License-Identifier: Apache-2.0
"""Find the cause of a failed or slow run in its log: the rule behind it, the lines to change, and a plan.

  offload diagnose train.log
  offload diagnose train.log run.yaml --gpus 16
  offload diagnose - < traceback.txt
  offload diagnose snapshot.pickle --plan plan.json

The run's configuration confirms the rules. If the log says how large the GPU is, a plan for that budget follows; a
known model (--model) or its sizes (--overrides) are enough for the plan.

If nothing failed, it reads the log's losses, norms, rewards and divergences for anomalies: their first step,
and the known faults with such numbers. It reads a report in words too.

Of a memory snapshot of torch's (_dump_snapshot) it prints each owner's bytes at the peak, or where memory ran out; of
two, the difference. The file is read, never executed.

Exit codes: 0 nothing failed and nothing is known of it, 1 something failed, is known or is wrong with the
configuration, 2 unusable input, 3 a fault of this tool.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from skill_tools.commands import plan_inputs, plan_request, releases
from skill_tools.commands.plan import FORMATS
from skill_tools.commands.plan_request import Predicted
from skill_tools.configs.config import Config
from skill_tools.configs.files import read_text
from skill_tools.configs.source import looks_like_configuration
from skill_tools.diagnosis import diagnosis, memory_owners, releases_in_log
from skill_tools.diagnosis.diagnosis import Diagnosis
from skill_tools.diagnosis.log import Log, read_log
from skill_tools.dialects.assumptions import Assumption
from skill_tools.errors import (
    NotPlannedError,
    OwnLoop,
    Unrecognised,
    UnusableInput,
    printable_json,
    printable_lines,
)
from skill_tools.planning.model import known_models
from skill_tools.planning.model.shape_sources import UnknownShapeError
from skill_tools.planning.search.planner import Plan
from skill_tools.reports import diagnoses
from skill_tools.rules.finding import Finding
from skill_tools.snapshots.snapshot import is_snapshot, read_snapshot
from skill_tools.started import COMMAND
from skill_tools.units import GIB, gib

_SAMPLE = 1 << 16
_USUAL_HOST = 32 * GIB  # of a small machine that trains, if the log names none
_LEAST_OF_A_HOST = 1 / 2  # a prediction of less did not fill it
_LESS = 0.9  # of the host memory that a killed run needs by prediction
_DATA = frozenset((".json", ".yaml", ".yml", ".toml"))
# A file in a command, or in a program.
_FILES = re.compile(r"(?<![\w./-])(?:[\w.-]+/)*[\w.-]+\.(?:py|sh|json|ya?ml|toml)\b")
_MOST_NAMED = 8
_IN_LOGS = "\t\n\v\f\r\a\b\x1b"  # blanks, bells, progress bars and colours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the log, the run's configuration, and the output."""
    # Optional for argparse: its own error would require FILE too. `_log` asks for it.
    parser.add_argument(
        "log", nargs="?", metavar="LOG", help="a training log or traceback; - reads standard input"
    )
    parser.add_argument(
        "inputs", nargs="*", metavar="FILE", help="the run's configuration, to confirm rules and to plan"
    )
    parser.add_argument(
        "--plan", dest="against", metavar="FILE", help="a plan as JSON, to set a memory snapshot beside"
    )
    plan_request.add_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, default="concise", help="default: concise")
    parser.add_argument("--details", action="store_true", help="show the plan with all its lines")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis of the log; return 1 when something was recognised, else 0."""
    plan_request.check(args)
    if args.log not in (None, "-") and is_snapshot(args.log):
        return _snapshots(args)
    if args.against:
        raise UnusableInput(
            f"--plan {args.against}: {args.log} is no memory snapshot",
            expected="--plan with a snapshot of torch's",
            attempt="the run's configuration after the log, which is planned for",
        )
    log = _log(args)
    read = _read(args, releases_in_log.releases(log))
    found = diagnosis.diagnose(
        log,
        findings=read.findings,
        framework=read.framework,
        config=read.config,
        releases=read.releases,
        unread=read.unread,
        known_gpu=_known_gpu,
        known_model=known_models.of_size,
    )
    plan, note, others = _plan(args, found)
    if args.format == "json":
        print(diagnoses.as_json(found, _plan_data(plan)))
        return 1 if found.has_problem else 0
    render = diagnoses.markdown if args.format == "markdown" else diagnoses.concise
    if plan is None:
        print(printable_lines(render(found, others=others)))
    else:
        from skill_tools.reports import plan_answer, plans

        print(printable_lines(render(found, planned=True, mended=plan_answer.has_changes(plan))))
        shown = plans.markdown if args.format == "markdown" else plans.concise
        print(printable_lines(f"\n{note}{shown(plan, details=args.details)}"))
    return 1 if found.has_problem else 0


def _snapshots(args: argparse.Namespace) -> int:
    """Print each owner's bytes in one snapshot, or the difference of two; 0, or 1 where memory ran out."""
    from offload_watch.report import planned
    from skill_tools.reports import snapshots

    if len(args.inputs) > 1 or (args.inputs and not is_snapshot(args.inputs[0])):
        raise UnusableInput(
            f"{args.inputs[-1]} stands beside a memory snapshot",
            expected="one snapshot, or two to compare",
            attempt=f"{COMMAND} diagnose {args.log} --plan plan.json",
        )
    read = [read_snapshot(path) for path in (args.log, *args.inputs)]
    plan = None if args.against is None else planned(_json(args.against))
    if args.against is not None and plan is None:
        raise UnusableInput(
            f"--plan {args.against} predicts nothing that can be compared",
            expected="a plan with a recommendation",
            attempt=f"{COMMAND} plan ... --format json > plan.json",
        )
    if args.format == "json":
        print(printable_json(snapshots.as_json(read, plan)))
    elif len(read) == 2:
        print(printable_lines(snapshots.difference(*read)))
    else:
        print(printable_lines(snapshots.concise(read[0], plan)))
    return 1 if any(each.wanted_bytes is not None for each in read[-1]) else 0


def _json(path: str) -> Any:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UnusableInput(
            f"{path} is no JSON: {error}",
            expected="a plan",
            attempt=f"{COMMAND} plan ... --format json > plan.json",
        ) from None


def _log(args: argparse.Namespace) -> Log:
    """Read the log; raises `UnusableInput` without one, for a log and a FILE in each other's place, and for a
    binary."""
    if args.log is None:
        raise UnusableInput(
            "no log is given",
            expected="LOG, a training log or traceback, or - for standard input",
            attempt=f"{COMMAND} diagnose train.log",
        )
    log = next((path for path in args.inputs if not looks_like_configuration(path)), None)
    if log is not None and looks_like_configuration(args.log):
        raise UnusableInput(
            f"{args.log} stands where the log belongs, and {log} after it",
            expected="LOG first, then the run's configuration",
            attempt=f"{COMMAND} diagnose {log} {args.log}",
        )
    if looks_like_configuration(args.log) and (framework := _framework_of(args.log)):
        raise UnusableInput(
            f"{args.log} is a configuration of {framework}, and no log is given",
            expected="LOG first, then the run's configuration",
            attempt=f"{COMMAND} lint {args.log}, or {COMMAND} diagnose train.log {args.log}",
        )
    text = read_log(args.log)
    if _is_binary(text.text[:_SAMPLE]):
        raise UnusableInput(
            f"{text.name} is no text", expected="a training log or traceback", attempt="the log of a rank"
        )
    return text


def _framework_of(path: str) -> str | None:
    """Return the framework if the file in the log's place is a configuration; a log of JSON lines is none."""
    from skill_tools.dialects.read import read

    try:
        return read([path]).framework
    except UnusableInput:
        return None


def _is_binary(sample: str) -> bool:
    """Return whether a decoded text was none: control bytes, or next to nothing but bytes that are not UTF-8.

    A log in an older encoding keeps its line ends and its Latin letters; a crashed host leaves a few NUL bytes.
    """
    control = sum(character < " " and character not in _IN_LOGS for character in sample)
    return control > len(sample) // 50 or sample.count("\N{REPLACEMENT CHARACTER}") > len(sample) // 3


def _known_gpu(name: str) -> str | None:
    """Return the name under which plans know a GPU."""
    from skill_tools.planning.cost import machine

    try:
        return machine.known(name).name
    except UnusableInput:
        return None


class _Read(NamedTuple):
    """The run's configuration as it was read, its findings, and the releases that it states."""

    framework: str
    config: Config | None = None
    findings: tuple[Finding, ...] = ()
    releases: Mapping[str, str] = MappingProxyType({})
    unread: Mapping[str, str] = MappingProxyType(
        {}
    )  # texts of files that are no configuration, or none together


def _texts(paths: Sequence[str]) -> dict[str, str]:
    """Return the beginnings of files by their paths: a launcher's options show the owners of memory."""
    texts = {}
    for path in paths:
        if Path(path).is_file():
            with Path(path).open("rb") as file:
                texts[path] = file.read(_SAMPLE).decode("utf-8", "replace")
    return texts


def _read(args: argparse.Namespace, ran: Mapping[str, str]) -> _Read:
    """Read and lint the configuration; a loop of the user's own has none, and its log says enough by itself.

    `ran` are the releases that the log states; those of the user or the configuration go before them.
    """
    said = {**ran, **{name: each.version for name, each in releases.stated_by_user(args).items()}}
    if not args.inputs:
        return _Read(args.framework or "", releases=said)
    from skill_tools.dialects.read import Contradiction
    from skill_tools.rules.lint import lint

    unread: dict[str, str] = {}
    launchers: list[Config] = []
    config: Config | None
    try:
        config = plan_inputs.read_config(args, args.inputs)
    except Unrecognised as problem:
        if args.framework and not isinstance(problem, OwnLoop):
            raise
        config, unread = _launched(args, problem)
    except UnusableInput as problem:
        try:
            config, unread, launchers = _alone(args, problem)
        except Contradiction:
            if args.framework:
                raise
            return _Read("", releases=said, unread=_by_texts(args, problem))
    if config is None:
        return _Read("", releases=said, unread=unread)
    of_run = releases.of_run(args, config, args.inputs)
    stated = {**ran, **{name: each.version for name, each in of_run.items()}}
    # A launcher's own configuration, say, that the script's is not read with.
    unread |= _texts([str(setting.value) for setting in config.unread_files])
    findings = [found for each in (config, *launchers) for found in lint(each, versions=stated).findings]
    return _Read(config.framework, config, tuple(findings), stated, unread)


def _launched(args: argparse.Namespace, problem: UnusableInput) -> tuple[Config | None, dict[str, str]]:
    """Return the configuration of a program that the user's launch script names, and the texts of all files.

    Without one the log is read with the texts alone. The program's own files are named in it.
    """
    named = _named_in(args.inputs)
    named += _named_in(named)
    texts = _texts([*args.inputs, *named])
    for program in (each for each in named if each.endswith(".py")):
        with suppress(UnusableInput):
            config = plan_inputs.read_config(args, [program])
            args.inputs = [program]
            return config, texts
    return None, texts | _by_texts(args, problem)


def _named_in(paths: Sequence[str]) -> list[str]:
    """Return the files beside scripts that these name."""
    found = [
        str(file)
        for path, text in _texts(paths).items()
        for word in _FILES.findall(text)
        if (file := Path(path).parent / word).is_file() and str(file) not in paths
    ]
    return list(dict.fromkeys(found))[:_MOST_NAMED]


def _by_texts(args: argparse.Namespace, problem: UnusableInput) -> dict[str, str]:
    """Return the texts of files that are no configuration, and say so."""
    print(f"offload: {problem}; the log is read without it", file=sys.stderr)
    texts, args.inputs = _texts(args.inputs), []
    return texts


def _alone(
    args: argparse.Namespace, refused: UnusableInput
) -> tuple[Config | None, dict[str, str], list[Config]]:
    """Return the configuration of one of several files, the texts of the others, refused together with it, and those
    of them that stand beside a trainer's: a launcher's, or a library's own.

    Of several of one framework the data file is read: a script beside it names it. None has one: the log is read
    with the texts alone. Raises `refused` if it is undecided, or if the user has named their framework.
    """
    if args.framework or len(args.inputs) < 2 or not all(Path(path).is_file() for path in args.inputs):
        raise refused
    from skill_tools.dialects import registry

    found: dict[str, Config] = {}
    for path in args.inputs:
        with suppress(UnusableInput):
            found[path] = plan_inputs.read_config(args, [path])
    if not found:
        print(f"offload: {refused}; the log is read with the texts of these files alone", file=sys.stderr)
        unread, args.inputs = _texts(args.inputs), []
        return None, unread, []
    embedded = {name for each in registry.with_files() for name in each.embeds}
    chosen = {path: each for path, each in found.items() if each.framework not in embedded} or found
    may_be = list(chosen) if len(chosen) == 1 else [path for path in chosen if Path(path).suffix in _DATA]
    if len(may_be) != 1 or len({each.framework for each in chosen.values()}) > 1:
        raise refused
    [path] = may_be
    others = [each for each in args.inputs if each != path]
    print(
        f"offload: {refused}; {path} is read as the configuration, without {' and '.join(others)}",
        file=sys.stderr,
    )
    args.inputs = [path]
    beside = [each for name, each in found.items() if name not in chosen]
    return found[path], _texts(others), beside


def _plan(args: argparse.Namespace, found: Diagnosis) -> tuple[Plan | None, str, str]:
    """Plan for the machine named by the log or the user; say on stderr why there is no plan.

    The second value is a line on facts from the log. The third one is about host memory held by others than
    the trainer: no plan would help.
    """
    ran_out = (found.out_of_memory is not None or found.host_ran_out) and not found.ran_out_behind
    wanted = ran_out or args.gpu_memory or args.gpu
    if not wanted or not (args.inputs or args.model or args.overrides):
        return None, "", ""
    try:
        args.gpu_capacity_bytes = found.gpu_bytes
        note = _machine_of_the_log(args, found)
        predicted = _predicted(args, found)
        if args.gpu_memory is None and found.gpu_bytes is not None:
            plan, about = _plan_within(args, found, found.gpu_bytes, predicted)
            return plan, f"{note}{about}", ""
        if found.host_ran_out and found.out_of_memory is None:
            least = _LEAST_OF_A_HOST * min(found.host_bytes or _USUAL_HOST, _USUAL_HOST)
            if 0 < predicted.memory.host_bytes_per_node < least:
                return None, "", memory_owners.small(predicted.memory.host_bytes_per_node)
            if others := _others(found, predicted):
                return None, "", others
            note += _less_of_the_host(args, found, predicted)
        return plan_request.make_plan(args, args.inputs), note, ""
    except UnusableInput as problem:
        answers_a_lora = isinstance(problem, NotPlannedError) and found.may_plan  # the command that follows
        if not answers_a_lora:
            print(f"offload: no plan: {problem}", file=sys.stderr)
        return None, "", ""


def _predicted(args: argparse.Namespace, found: Diagnosis) -> Predicted:
    """Predict the run; its model is the known one of the log's size if neither the user nor a file names one."""
    try:
        return plan_request.predict(args, args.inputs)
    except UnknownShapeError:
        if found.model is None:
            raise
        args.model = found.model
        return plan_request.predict(args, args.inputs)


def _machine_of_the_log(args: argparse.Namespace, found: Diagnosis) -> str:
    """Take the GPU and the host's memory from the log if the user names none; return a line about it."""
    taken = []
    args.takes_host_of_gpu = args.gpu is not None or bool(args.profile)
    if args.gpu is None and not args.profile and found.gpu is not None:
        args.gpu = found.gpu
        taken.append(f"GPU {found.gpu}")
    if args.host_memory is None and found.host_bytes is not None:
        args.host_memory = f"{found.host_bytes}bytes"
        taken.append(f"host memory {gib(found.host_bytes)}")
    return f"from the log: {', '.join(taken)}\n" if taken else ""


def _plan_within(
    args: argparse.Namespace, found: Diagnosis, gpu_bytes: int, predicted: Predicted
) -> tuple[Plan, str]:
    """Plan for the GPU's memory, less the memory that the run needed beyond its prediction."""
    needed = predicted.memory.allocated_bytes
    beyond = diagnosis.beyond_bytes(found, needed)
    args.gpu_memory = f"{max(gpu_bytes - beyond, 1)}bytes"
    note = diagnosis.budget_note(gpu_bytes, needed, beyond)
    plan = plan_request.make_plan(args, args.inputs)
    return plan._replace(assumptions=(Assumption(note), *plan.assumptions)), f"{note}\n"


def _others(found: Diagnosis, predicted: Predicted) -> str:
    """Return a sentence on others that hold the host's memory, if the prediction leaves so much: no plan helps then."""
    if found.in_use is None or not memory_owners.unexplained(
        found.in_use[0], predicted.memory.host_bytes_per_node
    ):
        return ""
    return memory_owners.sentence(*found.in_use, predicted.memory.host_bytes_per_node)


def _less_of_the_host(args: argparse.Namespace, found: Diagnosis, predicted: Predicted) -> str:
    """Leave the plan less of the host than the run's prediction, which was too much for the host of the log.

    A larger host of the user's keeps the difference. Return a line about it.
    """
    needed = predicted.memory.host_bytes_per_node
    there = predicted.budget.host_bytes
    if not needed or (there is not None and there < needed):
        return ""
    more = max(0, (there or 0) - found.host_bytes) if found.host_bytes else 0
    less = needed + more if more else round(needed * _LESS)
    args.host_memory = f"{less}bytes"
    host = f" for a host of {gib(found.host_bytes)}" if found.host_bytes else ""
    return (
        f"host memory: {gib(needed)} a node by prediction were too much{host}, so the plan takes less than "
        f"{gib(less)}\n"
    )


def _plan_data(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    from skill_tools.reports.plans_json import document

    return document(plan)
