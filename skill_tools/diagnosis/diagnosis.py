# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a failed or slow run's log: the facts about it, its cause, memory, steps, and the next command.

The diagnosis passes the log's numbers on to a plan (the GPU and its capacity, the allocated bytes, the host's memory):
the plan's budget is lowered by the bytes that the run needed beyond its prediction.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from skill_tools.configs.config import Config
from skill_tools.diagnosis import (
    builds,
    code,
    failures,
    fixes,
    known_errors,
    machine_in_log,
    memory,
    memory_owners,
    messages,
    model_in_log,
    no_effect,
    phases,
    quiet,
    steps,
    symptoms,
)
from skill_tools.diagnosis.changes import dialects_of
from skill_tools.diagnosis.conclusion import conclude
from skill_tools.diagnosis.evidence import Conclusion, Evidence, Suspect
from skill_tools.diagnosis.exceptions import native, own_files, ways_around
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.memory_owners import Owners
from skill_tools.diagnosis.messages import HOST_RAN_OUT, OF_THE_HOST, Seen
from skill_tools.diagnosis.model_in_log import Parameters
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.quiet import Complaint
from skill_tools.diagnosis.residency import moments
from skill_tools.diagnosis.series import anomalies, around, inert, numbers, own_runs
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.dialects import registry
from skill_tools.rules.finding import Finding, Severity
from skill_tools.rules.knowledge import Rule
from skill_tools.started import COMMAND
from skill_tools.units import GIB, gib

CPU_OPTIMIZER_BYTES = (
    16  # a parameter, in host memory: master, gradient and two moments (rule oc-host-memory)
)


# Messages about memory that is not the trainer's, or that no training step takes: they had fitted.
_BESIDE_STEPS = frozenset(("vllm-engine-out-of-memory", "oom-in-evaluation", "oom-in-generation"))
_SAID = 600  # characters of a failure's text, from its first line on
_PINS = re.compile(
    r"(?i)\bpin_memory\b|page-lock|pinned"
)  # settings that pin host memory, without any offload
_LOOKED_AT = 50  # exceptions of a log with a look at the events after them


def _none(_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything recognised in one log. `reported` is Megatron's (allocated, max allocated) in bytes.

    `gpu` is the log's GPU, `host_bytes` the run's part of its host, `parameters` the model's number of them, and
    `model` the known model of that size. `failure` is the exception that ended the run, `phase` its place or the log's
    end, `findings` are the configuration's own, fitting ones first. `releases` names the release of the failing code's
    package and the known ones. `suspects` are faults without a sign in the log, by the complaint about a run without a
    failure. `may_plan`: runs of the configuration's framework have a plan. `began`: options were
    read, and work had begun.
    """

    name: str
    errors: tuple[KnownError, ...]
    messages: tuple[Seen, ...]
    out_of_memory: OutOfMemory | None
    reported: tuple[int, int] | None
    steps: tuple[float, ...]
    patterns: tuple[StepPattern, ...]
    conclusion: Conclusion | None
    gpu: str | None
    host_bytes: int | None
    parameters: Parameters | None
    model: str | None
    failure: Failure | None
    phase: Phase
    findings: tuple[Finding, ...]
    owners: Owners
    in_use: tuple[int, int] | None
    releases: str
    suspects: Mapping[Complaint, tuple[Suspect, ...]] = field(default_factory=dict)
    may_plan: bool = True
    began: bool = False

    @property
    def recognised(self) -> bool:
        """Whether anything in the log is a problem that this tool knows."""
        return self.conclusion is not None and self.conclusion.is_known

    @property
    def has_problem(self) -> bool:
        """Whether something ended the run, is known of its log, or is wrong with its configuration."""
        wrong = any(finding.severity is not Severity.INFO for finding in self.findings)
        return self.conclusion is not None or self.failure is not None or wrong

    @property
    def host(self) -> Seen | None:
        """The first sign that the host's memory, or its lockable or shared part, ran out."""
        return next((seen for seen in self.messages if seen.message.kind in OF_THE_HOST), None)

    @property
    def host_ran_out(self) -> bool:
        """Whether the run was short of the host's memory itself, not of a part that may be pinned, locked or shared."""
        return self.host is not None and self.host.message.kind in HOST_RAN_OUT

    @property
    def ran_out_behind(self) -> bool:
        """Whether memory ran out in a save or merge behind the training, an evaluation, or an engine: no plan's."""
        if any(each.ended_the_run and each.message.id in _BESIDE_STEPS for each in self.messages[:1]):
            return True
        is_merge = memory_owners.MERGED in self.owners.of_the_host
        return self.phase is Phase.SAVE and (self.out_of_memory is not None or is_merge)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the step times without the first, which pins memory and compiles."""
        return steps.usual_s(self.steps)

    @property
    def gpu_bytes(self) -> int | None:
        """Capacity of the GPU that ran out of memory."""
        return self.out_of_memory.total_bytes if self.out_of_memory else None


def diagnose(
    log: Log,
    *,
    findings: Sequence[Finding] = (),
    framework: str = "",
    config: Config | None = None,
    releases: Mapping[str, str] = MappingProxyType({}),
    unread: Mapping[str, str] = MappingProxyType({}),
    known_gpu: Callable[[str], str | None] = _none,
    known_model: Callable[[int], str | None] = _none,
) -> Diagnosis:
    """Read `log`; `findings` are lint's about the run's `config`, which was read as one of `framework`.

    `releases` are the run's, by distribution, `unread` the texts of files that are no configuration of the run.
    `known_gpu` returns the name that a plan has for a GPU, `known_model` the one for a model of so many parameters,
    or None.
    """
    raised = native.completed(log, failures.failures(log))
    failure = failures.ended_by(log, raised)
    phase = phases.phase_of(log, failure)
    went_on_until = failures.went_on_until(log)
    past = _lines_of_what_was_caught(log, raised, failure, went_on_until)
    times = steps.times_s(log)
    wrong = anomalies.find(log)
    sources = no_effect.taken_out(config.sources, findings) if config else {}
    texts = symptoms.read(log, {**sources, **unread}.items())
    # If nothing is wrong, only facts of each such run count. The files show them, and the log is not asked.
    offloads = symptoms.running(texts if failure or wrong else texts[:-1], failure, config)
    said = _said(log, failure) if failure else ""
    found = [each for each in messages.find(log, failure) if not _is_past(each, went_on_until)]
    mechanisms = code.runs(config) | {each.message.shows for each in found if each.message.shows}
    pins = bool(mechanisms or offloads) or _PINS.search(log.text) is not None
    seen = tuple(
        each
        for each in found
        if (pins or each.message.needs != messages.PINNED) and not _is_harmless(each, log)
    )
    dialects = dialects_of(config, framework, known_errors.frameworks(log))
    told = frozenset(each.line for each in seen if each.message.role in messages.ANSWERS)
    evidence = Evidence(
        failure=failure,
        phase=phase,
        errors=tuple(
            each
            for each in known_errors.find(
                log, broken=[finding.rule for finding in findings], framework=framework, ended_by=failure
            )
            if not any(first <= each.line <= last for first, last in past)
            and not each.is_of_another(failure, dialects)
            and not each.is_told_otherwise(failure, dialects, told)
            and not (
                each.ended_the_run
                and all(moments.is_of_another((rule.id, *_keys(rule)), failure, phase) for rule in each.rules)
            )
        ),
        seen=seen,
        patterns=steps.patterns(log, times),
        out_of_memory=memory.out_of_memory(log),
        build=builds.first_error(log),
        owners=memory_owners.owners(
            log,
            {**sources, **unread},
            saving=phase is Phase.SAVE,
            starting=phase is Phase.STARTUP,
            ran_out=any(each.message.kind in HOST_RAN_OUT for each in seen),
        ),
        findings=findings,
        config=config,
        dialects=dialects,
        mechanisms=mechanisms,
        said=said,
        source=failures.source_line(log, failure) if failure else "",
        lines=failures.lines(log, failure) if failure else (),
        texts=texts[:-1],
        resumed=phases.resumed(log, failure),
        offloads=offloads,
        anomalies=wrong,
        faults=numbers.explain(wrong, offloads, texts, releases),
        mended=fixes.shown_by(failure, said or log.text, phase, texts, releases),
        around=around.find(log),
        inert=inert.find(log),
        releases=releases,
    )
    parameters = model_in_log.parameters(log)
    conclusion = ways_around.with_what_is_left(
        own_runs.told(own_files.told(conclude(evidence), evidence), log, evidence), evidence
    )
    unknown = failure is not None and conclusion is not None and not conclusion.is_known
    where = code.of(failure) if failure is not None and unknown else None
    return Diagnosis(
        name=log.name,
        errors=tuple(evidence.errors),
        messages=tuple(each for each in evidence.seen if each.message.role != "chatter"),
        out_of_memory=evidence.out_of_memory,
        reported=memory.reported_bytes(log),
        steps=times,
        patterns=(
            *(
                StepPattern(each.line, each.seen, anomalies.KINDS[each.kind])
                for each in wrong
                if each.is_strong
            ),
            *evidence.patterns,
        ),
        conclusion=conclusion,
        gpu=machine_in_log.gpu_name(log, known_gpu),
        host_bytes=machine_in_log.host_bytes(log),
        parameters=parameters,
        model=known_model(parameters.total) if parameters else None,
        failure=failure,
        phase=phase,
        findings=phases.in_order(tuple(findings), phase, failed=failure is not None),
        owners=evidence.owners,
        in_use=memory_owners.in_use(log),
        releases=code.release(where.code.package, releases) if where else "",
        suspects=quiet.suspects(evidence, log, texts, releases, usual_step_s=steps.usual_s(times))
        if conclusion is None
        else {},
        may_plan=not framework or registry.named(framework).is_planned,
        began=phases.began(log),
    )


def _keys(rule: Rule) -> tuple[str, ...]:
    """Return the names in a rule's condition; none of one that has none."""
    return tuple(rule.condition.names) if rule.tree else ()


def _said(log: Log, failure: Failure) -> str:
    """Return the text of `failure` from its first line on; of an abort its reason stands in the first line."""
    rest = log.text[failure.raised_at : min(failure.end, failure.raised_at + _SAID)]
    return rest if rest.startswith(failure.text) else f"{failure.text}\n{rest.partition(chr(10))[2]}"


def _lines_of_what_was_caught(
    log: Log, raised: Sequence[Failure], ended_by: Failure | None, went_on_until: int
) -> list[tuple[int, int]]:
    """Return the first and the last line of each exception after which training went on."""
    return [
        (log.line_at(each.start), log.line_at(each.raised_at))
        for each in raised[:_LOOKED_AT]
        if each is not ended_by and each.raised_at < went_on_until
    ]


def _is_past(seen: Seen, went_on_until: int) -> bool:
    """Return whether `seen` is a caught exception, or one that ended an earlier run in the same log."""
    return seen.message.role == "exception" and not seen.ended_the_run and seen.at < went_on_until


def _is_harmless(seen: Seen, log: Log) -> bool:
    """Return whether `seen` is a notice of a stopping or spoiling fault in a run that trained on behind it."""
    message = seen.message
    needs_nothing = message.role == "notice" and not message.needs and message.kind != "slow"
    return needs_nothing and failures.trains_after(log, seen.at)


def beyond_bytes(found: Diagnosis, predicted_bytes: int) -> int:
    """Return how much more than `predicted_bytes` the run needed when it ran out of memory."""
    needed = found.out_of_memory.needed_bytes if found.out_of_memory else None
    return max(0, (needed or 0) - predicted_bytes)


def budget_note(gpu_bytes: int, predicted_bytes: int, beyond: int) -> str:
    """Name the budget of a plan from a log and its reason; doubt the configuration where its prediction is far off."""
    left = f"budget: {gib(gpu_bytes)} of the GPU"
    if not beyond:
        return left
    doubt = "; is this the configuration of that run?" if beyond > predicted_bytes else ""
    return f"{left}, less {gib(beyond)} that the run needed beyond the {gib(predicted_bytes)} predicted for it{doubt}"


def host_need(found: Diagnosis) -> str:
    """Count a CPU optimizer's bytes in the host's memory, if the log of a run that ran out of it has the sizes."""
    if not found.host_ran_out or found.parameters is None:
        return ""
    trained = found.parameters.trained
    needed_bytes = CPU_OPTIMIZER_BYTES * trained
    there = ""
    if found.host_bytes is not None:
        enough = "" if needed_bytes < found.host_bytes else ": too little, if it is on one node"
        there = f"; the log gives a node {gib(found.host_bytes)}{enough}"
    return (
        f"an optimizer on the CPU keeps {gib(needed_bytes)} in host memory for {trained / 1e9:.1f}e9 trained "
        f"parameters (line {found.parameters.line}), {CPU_OPTIMIZER_BYTES} bytes each, over all nodes{there}"
    )


def advice(found: Diagnosis, *, planned: bool = False) -> tuple[str, ...]:
    """Return the commands to go on with; `planned` says that a plan follows, and needs none."""
    ran_out = (found.out_of_memory is not None or found.host_ran_out) and not found.ran_out_behind
    return (_plan_command(found),) if ran_out and not planned else ()


def _plan_command(found: Diagnosis) -> str:
    """Return the command of a plan for the log's run: from a configuration, or for a loop that has none."""
    words = [f"--gpu {found.gpu or 'NAME'}"]
    if found.gpu_bytes:
        words = [f"--gpu-memory {found.gpu_bytes / GIB:.1f}GiB"]
    if found.host_ran_out:
        words.append(f"--host-memory {f'{found.host_bytes / GIB:.1f}GiB' if found.host_bytes else 'AMOUNT'}")
    loop, machine = registry.named(registry.WITHOUT_FILES), " ".join(words)
    model = f" --model {found.model}" if found.model else ""
    of_loop = f"{COMMAND} plan --framework {loop.name}{model or ' --model NAME'} {machine}"
    if not found.may_plan:
        return f"{of_loop}, for the training alone"
    return f"{COMMAND} plan FILE{model} {machine}; for {loop.label}, which has no FILE: {of_loop}"
