"""Which of all that a log shows is the cause, the rule behind it, and the lines to change.

What ended the run outweighs what came before it: what is known of its exception is the answer. There a rule that the
run's own configuration breaks comes first, then a message whose frames the traceback goes through, then the others.
An event that many causes have (a hang, a killed process) is told by a finding of the configuration that stops a run
there, if there is one. A notice counts only where nothing failed and the run does what the notice is about. Where
nothing is known of an exception, the answer says where it was raised and what would decide.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.diagnosis import code, numbers, phases, symptoms
from skill_tools.diagnosis.anomalies import Anomaly
from skill_tools.diagnosis.builds import BuildError
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.fixes import Shown
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.memory_owners import Owners
from skill_tools.diagnosis.messages import ANSWERS, HOST_RAN_OUT, Message, Seen
from skill_tools.diagnosis.numbers import Found
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.rules.finding import Finding, Severity
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.units import gib

_LATE = frozenset({"hang", "numerics", "slow"})  # kinds that are as often an effect as a cause
_GENERIC = frozenset({"hang", "killed", "host-memory"})  # kinds that say what happened, and never why
_MEMORY = frozenset({"gpu-memory", "host-memory", "killed"})  # kinds whose lines a plan works out better
# Where one tensor of many was asked for: a gap that would hold it does not hold the others.
_FIRST_OF_MANY = frozenset({"adam-states-oom"})
_SILENT = frozenset({"wrong-numerics", "slow", "ignored"})  # effects that end no run
_SHOWN = 2
_MOST_SEEN, _MOST_OTHERS = 3, 2  # anomalies, and causes beside the first, that an answer has
_DEFRAGMENT = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class Evidence(NamedTuple):
    """All that a log and its run's configuration show. `dialects` are those whose settings the user has.

    `said` is the text of the failure from its first line on, `offloads` has what shows each kind of offload of the run.
    `anomalies` are what is wrong with its numbers, `faults` those that are known to give such. `mended` are faults of
    libraries that the failure shows, and that a later release mends.
    """

    failure: Failure | None
    phase: Phase
    errors: Sequence[KnownError]
    seen: Sequence[Seen]
    patterns: Sequence[StepPattern]
    out_of_memory: OutOfMemory | None
    build: BuildError | None
    owners: Owners
    findings: Sequence[Finding]
    config: Config | None
    dialects: tuple[str, ...]
    mechanisms: frozenset[str]
    said: str = ""
    offloads: Mapping[str, str] = MappingProxyType({})
    anomalies: Sequence[Anomaly] = ()
    faults: Sequence[Found] = ()
    mended: Sequence[Shown] = ()


class Conclusion(NamedTuple):
    """The cause in words, the rule that tells more if there is one, and the lines to change.

    `plans_away` says that a plan's lines, where there are any, take the place of these. Where `is_known` is false, the
    cause says that nothing is known of it, and `change` is what would decide. `others` are causes that fit too, each
    with what tells it apart.
    """

    cause: str
    rule: str
    change: tuple[str, ...]
    plans_away: bool = False
    is_known: bool = True
    others: tuple[str, ...] = ()


def conclude(evidence: Evidence) -> Conclusion | None:
    """Return the conclusion, or None where nothing failed and nothing in the log is known."""
    inside = _of_what_ended_it(evidence)
    if inside is not None:
        return inside
    outside = _of_the_rest(evidence)
    if outside is not None or evidence.failure is None or evidence.failure.is_aftermath:
        return outside
    if evidence.mended:
        return _of_mended(evidence.mended[0], evidence.mended[1:])
    return _of_symptom(evidence, evidence.failure) or _unknown(evidence, evidence.failure)


def _of_what_ended_it(evidence: Evidence) -> Conclusion | None:
    """Return what is known of the exception that ended the run."""
    errors = [error for error in evidence.errors if error.ended_the_run]
    seen = [each for each in evidence.seen if each.ended_the_run and each.message.role in ANSWERS]
    if confirmed := _confirmed(errors, evidence):
        return confirmed
    if evidence.build and (any(each.message.kind == "build" for each in seen) or not (errors or seen)):
        return Conclusion(f"{evidence.build.cause}: {evidence.build.text}", "", evidence.build.change)
    exact = next((each for each in seen if each.message.frames), None)
    if exact is not None:
        return _of_message(exact.message, evidence, errors)
    if evidence.mended and evidence.mended[0].fix.is_exact:
        return _of_mended(evidence.mended[0], evidence.mended[1:])
    return _known(errors, seen, evidence)


def _of_the_rest(evidence: Evidence) -> Conclusion | None:
    """Return what is known of what stands outside of any exception that ended the run."""
    failed = evidence.failure is not None and not evidence.failure.is_aftermath
    errors = [error for error in evidence.errors if not error.ended_the_run]
    seen = [each for each in evidence.seen if not each.ended_the_run and each.message.role in ANSWERS]
    if not failed and evidence.mended and evidence.mended[0].fix.is_exact:
        return _of_mended(evidence.mended[0], evidence.mended[1:])
    if failed:
        # Another's exception, or an earlier one, is not why this one was raised; a host without memory may be.
        seen = [each for each in seen if each.message.kind in HOST_RAN_OUT]
        return _known([], seen, evidence) or _of_fitting(evidence, needs_code=True)
    known = _confirmed(errors, evidence) or _known(errors, seen, evidence)
    if known is not None:
        return known
    if evidence.build is not None and evidence.failure is not None:
        return Conclusion(f"{evidence.build.cause}: {evidence.build.text}", "", evidence.build.change)
    if (wrong := _of_numbers(evidence)) is not None:
        return wrong
    return _of_fitting(evidence, needs_code=False) or _of_notice(evidence) or _of_pattern(evidence)


def _known(errors: Sequence[KnownError], seen: Sequence[Seen], evidence: Evidence) -> Conclusion | None:
    """Return what rules' texts (`errors`) and messages say, whichever knows more of the run."""
    same_text = [error for error in errors if error.of_the_run and seen and error.line == seen[0].line]
    if same_text:
        return _of_rule(same_text[0].rules[0])
    if seen and (seen[0].message.kind not in _LATE or not errors):
        return _of_message(seen[0].message, evidence, errors)
    return _of_error(errors, evidence) if errors else None


def _of_error(errors: Sequence[KnownError], evidence: Evidence) -> Conclusion:
    """Return what a rule's text means; the change of a rule about another framework is none for this run."""
    own = next((error for error in errors if error.of_the_run), None)
    if own is not None or not evidence.dialects:
        return _of_rule((own or errors[0]).rules[0])
    rule = errors[0].rules[0]
    where = code.of(evidence.failure) if evidence.failure is not None else None
    return Conclusion(rule.title, "", where.code.decide if where else _DECIDE)


def _confirmed(errors: Sequence[KnownError], evidence: Evidence) -> Conclusion | None:
    broken = {finding.rule: finding for finding in evidence.findings}
    return next((_of_finding(broken[error.confirmed[0]]) for error in errors if error.confirmed), None)


def _of_message(message: Message, evidence: Evidence, errors: Sequence[KnownError]) -> Conclusion:
    for finding in evidence.findings:
        if finding.rule in message.explained_by:
            return _of_finding(finding)._replace(plans_away=message.kind in _MEMORY)
    if message.kind == "numerics" and (wrong := _of_numbers(evidence)) is not None and wrong.is_known:
        return wrong
    if message.kind in _GENERIC and (fitting := _of_fitting(evidence, needs_code=False)) is not None:
        return fitting
    if message.kind == "hang" and evidence.phase is Phase.STARTUP and evidence.mechanisms:
        return _of_a_hang_at_the_start(evidence)
    change = tuple(told(each, evidence.dialects, evidence.config) for each in message.change)
    if message.kind in HOST_RAN_OUT:
        return _of_the_host(message, evidence, change)
    out_of_memory = evidence.out_of_memory
    fragments = out_of_memory.unallocated_bytes if out_of_memory and out_of_memory.is_fragmented else None
    if message.kind == "gpu-memory" and fragments is not None and message.id not in _FIRST_OF_MANY:
        cause = f"fragmentation: {gib(fragments)} was reserved and unused, more than was asked for"
        return Conclusion(cause, _rule(message.rule, evidence), (_DEFRAGMENT, *change)[:_SHOWN])
    cause = message.cause
    if message.kind == "gpu-memory" and out_of_memory is not None and out_of_memory.is_shared:
        cause += f"; {_others_hold(out_of_memory, evidence)}"
        change = (told("others-off-the-gpu", evidence.dialects, evidence.config), *change)
    elif message.kind == "gpu-memory" and evidence.owners.gpu_share is not None:
        cause += f"; a rollout engine takes {evidence.owners.gpu_share:.0%} of the GPU while it runs"
        change = (told("smaller-rollout", ()), *change)
    rule = _rule(message.rule, evidence) or next(
        (error.rules[0].id for error in errors if error.of_the_run), ""
    )
    return Conclusion(cause, rule, change[:_SHOWN], plans_away=message.kind in _MEMORY)


def _others_hold(out_of_memory: OutOfMemory, evidence: Evidence) -> str:
    """Say that another process holds memory of the GPU, and whose it may be."""
    held = f"another process holds {gib(out_of_memory.others_bytes)} of this GPU"
    if "sleep" in evidence.offloads:
        return f"{held}: a rollout engine that is awake, or of which a part does not sleep"
    return f"{held}: an earlier run that still lives, a notebook, or a rollout engine"


def _of_a_hang_at_the_start(evidence: Evidence) -> Conclusion:
    """Return a conclusion about a collective that no rank came past before the first step: no save, no slow update."""
    offloads = ", ".join(f"{each.written}={each.value}" for each in code.offloads(evidence.config))
    cause = (
        "a collective never ended at the start, before the first step, so it was no save and no slow update"
    )
    if offloads:
        cause += f"; {offloads} puts tensors on the CPU, and building, initialising or loading those may wait for ever"
    return Conclusion(
        cause,
        "",
        (
            told("params-on-gpu", evidence.dialects, evidence.config),
            "or another release of torch and of the framework: a rank that waits in py-spy dump says in which call",
        ),
    )


def _of_the_host(message: Message, evidence: Evidence, change: tuple[str, ...]) -> Conclusion:
    """Return a conclusion about host memory: whose it was, where the log or the configuration says it."""
    owners = evidence.owners
    cause, rule = message.cause, _rule(message.rule, evidence)
    if owners.process:
        cause += f"; {owners.process} alone held {gib(owners.process_bytes)}"
    elif owners.of_the_host:
        others = "; ".join(owners.of_the_host)
        cause += f"{_at_a_save(evidence)}; beside the trainer's own states it holds {others}"
    less = tuple(told(each, evidence.dialects, evidence.config) for each in owners.less)
    if evidence.config is not None and not evidence.mechanisms and not less:
        change = (
            "what this process holds: smaller batches, fewer workers, data that is mapped from disk",
            told("more-host-memory", ()),
        )
        rule = ""
    return Conclusion(cause, rule, (*less[:1], *change)[:_SHOWN], plans_away=not (less or owners.process))


def _at_a_save(evidence: Evidence) -> str:
    return " while a checkpoint was saved" if evidence.phase is Phase.SAVE else ""


def _of_fitting(evidence: Evidence, *, needs_code: bool) -> Conclusion | None:
    """Return the configuration's own finding that shows where this log ends.

    With `needs_code`, only one about a mechanism whose code the exception was raised in.
    """
    where = code.of(evidence.failure) if evidence.failure is not None else None
    stopped = evidence.failure is not None or any(each.message.kind in _GENERIC for each in evidence.seen)
    mechanisms = {rule.id: rule.mechanism for rule in load_rules()} if evidence.findings else {}
    for finding in phases.in_order(tuple(evidence.findings), evidence.phase, failed=stopped):
        if finding.severity is Severity.INFO:
            continue
        if stopped and finding.effect == "out-of-memory" and not _is_of_memory(evidence):
            continue
        fits = phases.stops(finding, evidence.phase) if stopped else finding.effect in _SILENT
        # What would have printed its own text is not why another was printed.
        silent = finding.effect == "crashes-later" or not finding.text
        in_its_code = where is not None and mechanisms.get(finding.rule) in where.code.mechanisms
        if fits and (silent or not stopped) and (in_its_code or not needs_code):
            return _of_finding(finding)
    return None


def _is_of_memory(evidence: Evidence) -> bool:
    """Return whether the log says that memory ran out; any other exception has another cause."""
    return evidence.out_of_memory is not None or any(each.message.kind in _MEMORY for each in evidence.seen)


def _of_notice(evidence: Evidence) -> Conclusion | None:
    for each in evidence.seen:
        message = each.message
        if message.role == "notice" and (not message.needs or message.needs in evidence.mechanisms):
            return _of_message(message, evidence, ())
    return None


def _of_pattern(evidence: Evidence) -> Conclusion | None:
    for pattern in evidence.patterns:
        return Conclusion(f"{pattern.seen}: {pattern.points_to}", pattern.rule, ())
    return None


def _of_numbers(evidence: Evidence) -> Conclusion | None:
    """Return what numbers that are wrong say, where nothing failed: a finding or a fault that gives such, or neither.

    What a healthy run may show too counts only beside one that is known to give it.
    """
    if not evidence.anomalies:
        return _of_silent_fault(evidence)
    seen = "; ".join(dict.fromkeys(each.seen for each in evidence.anomalies[:_MOST_SEEN]))
    proven = [each for each in evidence.faults if each.fault.has_evidence]
    finding = _that_gives(evidence)
    if finding is not None:
        conclusion = _of_finding(finding)
        return conclusion._replace(cause=f"{seen}; most likely: {conclusion.cause}", others=_others(proven))
    if proven:
        return _of_fault(proven[0], proven[1:], seen, evidence)
    if not any(each.is_strong for each in evidence.anomalies):
        return None
    return _unexplained(seen, evidence)


def _of_silent_fault(evidence: Evidence) -> Conclusion | None:
    """Return a conclusion about a fault that each such run has, though no number of this log shows it."""
    if not evidence.faults or evidence.failure is not None:
        return None
    first, *others = evidence.faults
    return _of_fault(first, others, "nothing failed, and no number of this log stands out", evidence)


def _that_gives(evidence: Evidence) -> Finding | None:
    """Return the configuration's own finding that gives the numbers; first one that loses what was loaded."""
    fitting = [each for each in evidence.findings if numbers.gives(each.rule, evidence.anomalies)]
    return min(fitting, key=lambda each: not phases.loses_what_was_loaded(each), default=None)


def _of_fault(found: Found, others: Sequence[Found], seen: str, evidence: Evidence) -> Conclusion:
    fault = found.fault
    sure = "most likely" if found.is_likely else "known to give that here:"
    if found.depends_on:
        sure = f"if this is {' and '.join(found.depends_on)}, {sure}"
    change = [told(each, evidence.dialects, evidence.config) for each in fault.change]
    offload = symptoms.load_offloads().get(fault.offload)
    if offload is not None:
        change.append(f"or {symptoms.switched_off(offload, evidence.config)}")
    return Conclusion(
        f"{seen}; {sure} {fault.cause}; shown by {', '.join(found.shown_by)}",
        "",
        tuple(change),
        others=(f"to be sure: {fault.tell}", *_others(others)),
    )


def _others(found: Sequence[Found]) -> tuple[str, ...]:
    """Say what else fits the numbers, each with the experiment that tells it apart."""
    return tuple(
        f"or, if this is {' and '.join(each.depends_on)}, {each.fault.cause}; told apart by {each.fault.tell}"
        if each.depends_on
        else f"or {each.fault.cause}; told apart by {each.fault.tell}"
        for each in found[:_MOST_OTHERS]
    )


def _unexplained(seen: str, evidence: Evidence) -> Conclusion:
    """Say what is seen in the numbers, that no fault is known to be behind them, and what would decide it."""
    known = symptoms.load_offloads()
    running = [(known[name], by) for name, by in evidence.offloads.items()]
    if not running:
        cause = f"not known. {seen}; nothing that was given shows an offload"
        return Conclusion(
            cause, "", _DECIDE_NUMBERS_ELSEWHERE, is_known=False, others=_others(evidence.faults)
        )
    by = ", ".join(f"{offload.name} ({shown})" for offload, shown in running[:_MOST_SEEN])
    off = symptoms.switched_off(running[0][0], evidence.config)
    change = (
        f"{off}, for 20 steps from the same weights with one seed and unshuffled data: if the numbers stay wrong, the "
        "offload is not the cause",
        "CUDA_LAUNCH_BLOCKING=1 for 20 steps: if the numbers are right then, copies race with the computation",
    )
    cause = f"not known. {seen}; this run has {by}"
    return Conclusion(cause, "", change, is_known=False, others=_others(evidence.faults))


def _of_mended(shown: Shown, others: Sequence[Shown]) -> Conclusion:
    """Return a conclusion about a fault of a library that a later release mends."""
    fix = shown.fix
    sure = f"if this is {' and '.join(shown.depends_on)}, most likely" if shown.depends_on else "most likely"
    by = f"; shown by {', '.join(shown.by)}" if shown.by else ""
    change = (fix.change, *([f"or {fix.instead}"] if fix.instead else []))
    return Conclusion(
        f"{sure} a fault of {fix.package}: {fix.cause}{by}",
        "",
        change[:_SHOWN],
        others=tuple(f"or {each.fix.cause} ({each.fix.change})" for each in others[:_MOST_OTHERS]),
    )


def _of_symptom(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return what such a failure most likely means under an offload that the run has."""
    found = symptoms.explain(failure, evidence.said, evidence.phase, evidence.offloads)
    if found is None:
        return None
    where = code.of(failure)
    package = where.code.package if where is not None else "the framework"
    change = tuple(
        told(each.replace("{package}", package), evidence.dialects, evidence.config) for each in found.change
    )
    off = symptoms.switched_off(found.offload, evidence.config)
    cause = f"most likely {found.offload.name}, which {found.shown_by} shows: {found.cause.cause}"
    return Conclusion(cause, "", (*change[:1], f"or {off}"))


def _unknown(evidence: Evidence, failure: Failure) -> Conclusion:
    """Say what is known of an exception whose cause is not, and what would decide it."""
    who = f"{failure.rank} " if failure.rank else "the run "
    cause = f"not known. {who}ended {evidence.phase} in {failure.text[:300]}"
    where = code.of(failure)
    if where is not None:
        frame = where.frame
        cause += f"; raised through {where.code.name} ({frame.path.rpartition('/')[2]}:{frame.line} {frame.function})"
    elif failure.frames:
        frame = failure.frames[-1]
        cause += f"; raised in {frame.path}:{frame.line} {frame.function}, in no code that offloads"
    offloads = code.offloads(evidence.config, where.code.mechanisms if where else ())
    if offloads:
        cause += "; this run offloads by " + ", ".join(f"{each.written}={each.value}" for each in offloads)
    elif evidence.config is not None:
        cause += "; the configuration offloads nothing that is known"
    may_be_an_offload = offloads or evidence.config is None
    if where is not None and (where.code.mechanisms or may_be_an_offload):
        return Conclusion(cause, "", where.code.decide, is_known=False)
    return Conclusion(cause, "", _DECIDE if may_be_an_offload else _DECIDE_ELSEWHERE, is_known=False)


_DECIDE = (
    "the same run for 3 steps without any offload: if it fails too, no offload is the cause",
    "the whole traceback of the first rank that failed, and the configuration, given to diagnose",
)
_DECIDE_NUMBERS_ELSEWHERE = (
    "the run's configuration or script, given to diagnose after the log",
    "a tenth of the learning rate, and the batch of the first wrong step looked at: the two usual causes",
)
_DECIDE_ELSEWHERE = (
    "the exception's own text: nothing here offloads, so no offload is the cause",
    "the whole traceback of the first rank that failed",
)


def _rule(name: str, evidence: Evidence) -> str:
    """Return a message's rule where it is about a framework of this run, or where nobody knows the framework."""
    if not name or not evidence.dialects:
        return name
    own = next((rule.dialects for rule in load_rules() if rule.id == name), ())
    return name if set(own) & set(evidence.dialects) else ""


def _of_finding(finding: Finding) -> Conclusion:
    fix = finding.fix
    lines = fix.options or tuple(_changed(fix.diff)) or (finding.next,)
    return Conclusion(f"{finding.title} ({finding.place})", finding.rule, lines[:_SHOWN])


def _of_rule(rule: Rule) -> Conclusion:
    fix = rule.fix
    set_ = tuple(f"{key}: {value}" for key, value in fix.set.items())
    return Conclusion(rule.title, rule.id, (fix.options or set_ or (rule.next,))[:_SHOWN])


def _changed(diff: str) -> Iterable[str]:
    """Yield the lines that a diff puts in, or where it puts in none, those that it takes out."""
    lines = [line for line in diff.splitlines() if not line.startswith(("+++", "---", "@@"))]
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    return added or [f"remove {line[1:].strip()}" for line in lines if line.startswith("-")]
