# SPDX-License-Identifier: Apache-2.0
"""The cause of all that a log shows, the rule behind it, and the lines to change.

The exception that ended the run outweighs all before it: the facts about it are the answer. A rule broken by the run's
own configuration comes first, then a message with frames of the traceback, then the others. An event with many causes
(a hang, a killed process) is told by the configuration's finding that stops a run there, if there is one. A notice
counts only if nothing failed and the run has the notice's subject. For an unknown exception the answer gives the place
of its code and the deciding experiment.
"""

import re
from collections.abc import Sequence

from skill_tools.diagnosis import code, events, no_effect, phases, symptoms
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence, of_finding, reason
from skill_tools.diagnosis.exceptions import interfaces, native, operands, own_words, source_line, ways_around
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.fixes import Shown
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory_owners import others_hold
from skill_tools.diagnosis.messages import ANSWERS, HOST_RAN_OUT, Message, Seen
from skill_tools.diagnosis.newer import at_fault, with_release
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency import moments, rows
from skill_tools.diagnosis.residency.moments import Moment
from skill_tools.diagnosis.series.wrong_numbers import of_numbers
from skill_tools.rules.finding import Severity
from skill_tools.rules.knowledge import load_rules
from skill_tools.units import gib

_LATE = frozenset({"hang", "numerics", "slow"})  # kinds as often an effect as a cause
_GENERIC = frozenset({"hang", "killed", "host-memory"})  # kinds of the event, never of its cause
_MEMORY = frozenset({"gpu-memory", "host-memory", "killed"})  # kinds with better lines from a plan
_OF_PINNED = frozenset({"pinned-memory", "locked-memory"})  # kinds of a host that can lock no more
_TENSORS = frozenset({"oom-of-logits", "oom-of-attention"})  # messages with the tensor that had no room
# One tensor of many was asked for: a gap for it does not hold the others.
_FIRST_OF_MANY = frozenset({"adam-states-oom"})
_CRASH = "crash"  # the kind of a process's end; it says nothing beside an exception of that process
_SILENT = frozenset({"wrong-numerics", "slow", "ignored"})  # effects that end no run
_OF_MESSAGES = frozenset({"params", "optimizer", "cpu"})  # offloads of messages about devices
_OF_STATES = ("params", "optimizer", "zero3")  # offloads that free weights or states, and no activations
_ENGINES = frozenset({"sleep", "memory-saver", "phases"})  # offloads with a rollout engine on the GPU in turn
_OF_A_MESSAGE = 4  # kinds of evidence behind a message at most: its text, two frames and a configuration
_MOST_OTHERS = 2  # causes of an answer beside the first
_BELOW = re.compile(r"<(\d[\w.]*)$")  # the release before which a rule holds
# For HIP the allocator reads CUDA's variable.
_DEFRAGMENT = {
    device: (f"export PYTORCH_{variable}_ALLOC_CONF=expandable_segments:True",)
    for device, variable in {"CUDA": "CUDA", "HIP": "CUDA", "NPU": "NPU"}.items()
}


def conclude(evidence: Evidence) -> Conclusion | None:
    """Return the conclusion, or None where nothing failed and nothing in the log is known."""
    return with_release(_with_the_operand(_conclusion(evidence), evidence), evidence)


def _with_the_operand(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion` with the operand on another device by the exception, or the tensor that its line reads."""
    words = operands.told(evidence.said) or source_line.told(evidence)
    if conclusion is None or conclusion.rule or not words or words in conclusion.cause:
        return conclusion
    return conclusion._replace(cause=f"{conclusion.cause}; {words}")


def _conclusion(evidence: Evidence) -> Conclusion | None:
    inside = _of_what_ended_it(evidence)
    if inside is not None:
        return inside
    outside = _of_the_rest(evidence)
    if outside is not None or evidence.failure is None or evidence.failure.is_aftermath:
        return outside
    if evidence.mended:
        return _of_mended(evidence.mended[0], evidence.mended[1:], evidence)
    symptom = _of_symptom(evidence, evidence.failure)
    exact = _explained(evidence, evidence.failure)
    return (
        _of_words(source_line.of_gradients(evidence))
        or _of_words(interfaces.handed_on(evidence.failure, evidence.texts))
        or (symptom if exact is not None and exact.cause.is_exact else None)
        or _of_words(own_words.refusal(evidence.failure, evidence.said, evidence.texts))
        or _of_residency(evidence, evidence.failure)
        or (None if moments.is_before_training(evidence.failure, evidence.phase) else symptom)
        or _of_words(interfaces.misfit(evidence.failure, evidence.source, evidence.texts))
        or (
            None
            if evidence.offloads
            else _of_words(
                operands.without_offload(evidence.failure, evidence.said, evidence.lines, evidence.texts)
            )
        )
        or _of_a_crash(evidence, evidence.failure)
        or ways_around.of_own_code(evidence, evidence.failure)
        or ways_around.of_code_that_is_off(evidence, evidence.failure)
        or _unknown(evidence, evidence.failure)
    )


def _of_what_ended_it(evidence: Evidence) -> Conclusion | None:
    """Return the facts about the exception that ended the run."""
    errors = [error for error in evidence.errors if error.ended_the_run]
    seen = [
        each
        for each in evidence.seen
        if each.ended_the_run and each.message.role in ANSWERS and each.message.kind != _CRASH
    ]
    if confirmed := _confirmed(errors, evidence):
        return confirmed
    if evidence.build and (any(each.message.kind == "build" for each in seen) or not (errors or seen)):
        return Conclusion(f"{evidence.build.cause}: {evidence.build.text}", "", evidence.build.change)
    exact = next((each for each in seen if each.message.frames), None)
    mended = evidence.mended[0] if evidence.mended else None
    if exact is not None and not (mended and mended.fix.asked > _OF_A_MESSAGE):
        return _of_message(exact.message, evidence, errors)
    # A rule's text without the rule's settings is less than a fault with its own words in the run's files.
    outweighs = mended is not None and mended.fix.needs and errors and evidence.config is not None
    if mended is not None and (mended.fix.is_exact or outweighs):
        return _of_mended(mended, evidence.mended[1:], evidence)
    return _of_another_offload(errors, seen, evidence) or _known(errors, seen, evidence)


def _of_another_offload(
    errors: Sequence[KnownError], seen: Sequence[Seen], evidence: Evidence
) -> Conclusion | None:
    """Return the meaning of a text about devices, or of a collective, under an offload that is not the messages'."""
    if errors or not seen or evidence.failure is None:
        return None
    if seen[0].message.kind == "collectives":
        found = _explained(evidence, evidence.failure)
        told_apart = found is not None and (found.cause.phase or found.cause.frames)
        return _of_symptom(evidence, evidence.failure) if told_apart else None
    if seen[0].message.kind != "devices":
        return None
    found = _explained(evidence, evidence.failure)
    if found is not None and found.cause.offload not in _OF_MESSAGES:
        placed = None if found.cause.is_exact else _of_residency(evidence, evidence.failure)
        return placed or _of_symptom(evidence, evidence.failure)
    return _of_residency(evidence, evidence.failure) if evidence.phase is Phase.RESUME else None


def _of_a_crash(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return the usual cause of a crash of native code without a known frame."""
    crash = next((each.message for each in evidence.seen if each.message.kind == _CRASH), None)
    return _of_message(crash, evidence, ()) if crash and native.is_bare(failure) else None


def _of_the_rest(evidence: Evidence) -> Conclusion | None:
    """Return the facts about texts outside of any exception that ended the run."""
    failed = evidence.failure is not None and not evidence.failure.is_aftermath
    errors = [error for error in evidence.errors if not error.ended_the_run]
    answers = [each for each in evidence.seen if each.message.role in ANSWERS]
    crashes = [each for each in answers if each.message.kind == _CRASH]
    seen = [each for each in answers if each not in crashes and not each.ended_the_run]
    if not failed and evidence.mended and evidence.mended[0].fix.is_exact:
        return _of_mended(evidence.mended[0], evidence.mended[1:], evidence)
    if failed:
        # Another's exception, or an earlier one, is not why this one was raised; a host without memory may be.
        seen = [each for each in seen if each.message.kind in HOST_RAN_OUT]
        return _known([], seen, evidence) or _of_fitting(evidence, needs_code=True)
    known = _confirmed(errors, evidence) or _known(errors, seen, evidence)
    if known is not None:
        return known
    if evidence.build is not None and evidence.failure is not None:
        return Conclusion(f"{evidence.build.cause}: {evidence.build.text}", "", evidence.build.change)
    if (wrong := of_numbers(evidence)) is not None:
        return wrong
    if crashes:  # a process's end without a reason
        return _of_message(min(crashes, key=lambda each: each.line).message, evidence, ())
    return (
        _of_fitting(evidence, needs_code=False)
        or no_effect.concluded(evidence)
        or _of_notice(evidence)
        or _of_pattern(evidence)
    )


def _known(errors: Sequence[KnownError], seen: Sequence[Seen], evidence: Evidence) -> Conclusion | None:
    """Return the meaning by rules' texts (`errors`) or by messages, whichever know more of the run."""
    same_text = [error for error in errors if error.of_the_run and seen and error.line == seen[0].line]
    if same_text:
        return ways_around.of_text(same_text[0].rules[0], evidence)
    if seen and (seen[0].message.kind not in _LATE or not errors):
        return _of_message(seen[0].message, evidence, errors)
    return _of_error(errors, evidence) if errors else None


def _of_error(errors: Sequence[KnownError], evidence: Evidence) -> Conclusion:
    """Return the meaning of a rule's text; the change of a rule about another framework is none for this run."""
    own = next((error for error in errors if error.is_about(evidence.dialects)), None)
    if own is not None or not evidence.dialects:
        return ways_around.of_text((own or errors[0]).rules[0], evidence)
    rule = errors[0].rules[0]
    if said := evidence.failure and own_words.refusal(evidence.failure, evidence.said, evidence.texts):
        return Conclusion(f"{rule.title}; {said.cause}", "", said.change)
    where = code.of(evidence.failure) if evidence.failure is not None else None
    newer = tuple(
        f"{package} {bound[1]} or newer"
        for package, range_ in rule.versions.items()
        if (bound := _BELOW.search(range_))
    )
    change = (*newer, *(where.code.decide if where else _DECIDE))[:SHOWN]
    return Conclusion(f"{rule.title}{reason(rule.why)}", "", change)


def _confirmed(errors: Sequence[KnownError], evidence: Evidence) -> Conclusion | None:
    broken = {finding.rule: finding for finding in evidence.findings}
    return next((of_finding(broken[error.confirmed[0]]) for error in errors if error.confirmed), None)


def _of_message(message: Message, evidence: Evidence, errors: Sequence[KnownError]) -> Conclusion:
    for finding in evidence.findings:
        if finding.rule in message.explained_by:
            return of_finding(finding)._replace(plans_away=message.kind in _MEMORY)
    if message.kind == "numerics" and (wrong := of_numbers(evidence)) is not None and wrong.is_known:
        return wrong
    if message.kind in _GENERIC and (fitting := _of_fitting(evidence, needs_code=False)) is not None:
        return fitting
    if message.kind == "hang" and evidence.phase is Phase.STARTUP and evidence.mechanisms:
        return events.hang_at_the_start(evidence)
    change = tuple(told(each, evidence.dialects, evidence.config) for each in message.change)
    if message.kind == "hang" and not message.frames:
        return events.hang_of_ranks(message.cause, _rule(message.rule, evidence), evidence, change)
    if message.kind in HOST_RAN_OUT or events.fills_the_host(message.change, evidence):
        return events.full_host(message.cause, _rule(message.rule, evidence), evidence, change)
    out_of_memory = evidence.out_of_memory
    fragments = out_of_memory.unallocated_bytes if out_of_memory and out_of_memory.is_fragmented else None
    if out_of_memory and out_of_memory.is_shared and out_of_memory.others_bytes > (fragments or 0):
        fragments = None  # the others hold more than this process left unused
    if message.kind == "gpu-memory" and fragments is not None and message.id not in _FIRST_OF_MANY:
        cause = f"fragmentation: {gib(fragments)} was reserved and unused, more than was asked for"
        because, less = _of_a_tensor(message) or _why_full(evidence)
        joined = _DEFRAGMENT.get(out_of_memory.device, ()) if out_of_memory else ()
        return Conclusion(cause + because, _rule(message.rule, evidence), (*joined, *less, *change)[:SHOWN])
    cause = message.cause
    if message.kind == "gpu-memory" and not message.frames and _of_a_tensor(message) is None:
        because, less = _why_full(evidence)
        cause, change = cause + because, (*less, *change)
        because, less = no_effect.of_a_setting(evidence)
        cause, change = cause + because, (*less[:1], *change)
        because, less = ways_around.of_what_is_kept(evidence)
        cause, change = cause + because, (*change[:1], *less, *change[1:])
    elif message.kind == "resume" and out_of_memory is not None:
        because, less = _by_residency(evidence)
        cause, change = cause + because, (*change[:1], *less, *change[1:])
    if message.kind == "gpu-memory" and out_of_memory is not None and out_of_memory.is_shared:
        held, off = others_hold(out_of_memory, engine=not _ENGINES.isdisjoint(evidence.offloads))
        cause += f"; {held}"
        change = (told(off, evidence.dialects, evidence.config), *(() if out_of_memory.like_this else change))
    elif message.kind == "gpu-memory" and evidence.around is not None:
        beside, less = no_effect.beside(evidence)
        cause, change = cause + beside, (*less[:1], *change)
    elif message.kind == "gpu-memory" and evidence.owners.gpu_share is not None:
        cause += f"; a rollout engine takes {evidence.owners.gpu_share:.0%} of the GPU while it runs"
        change = (told("smaller-rollout", ()), *change)
    rule = _rule(message.rule, evidence) or next(
        (error.rules[0].id for error in errors if error.of_the_run), ""
    )
    if message.kind in _MEMORY:
        in_a_step = not message.frames and not source_line.moved(evidence)[0]  # what a plan is made for
        return Conclusion(cause, rule, change[:SHOWN], plans_away=in_a_step)
    if message.kind in _OF_PINNED and (fewer := ways_around.less_of_it(evidence)):
        change = (change[0], fewer)
    change = change[:SHOWN]
    return Conclusion(
        cause, rule, (*change, *ways_around.off(evidence, change), *ways_around.without_the_option(evidence))
    )


def _of_a_tensor(message: Message) -> tuple[str, tuple[str, ...]] | None:
    """Return the cause of a message that names the tensor itself, as an addition; None of one that names none."""
    return (f"; {message.cause}", ()) if message.frames or message.id in _TENSORS else None


def _why_full(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Name the tensors that filled the GPU, by the run's offload and the place of the failure, and the change."""
    because, less = no_effect.of_the_optimizer(evidence)
    if not because:
        because, less = source_line.moved(evidence)
    if because:
        return because, less
    found = _explained(evidence, evidence.failure)
    if found is None:
        return _by_residency(evidence)
    because = f"; most likely, with {found.offload.name} ({found.shown_by}): {found.cause.cause}"
    return because, tuple(told(each, evidence.dialects, evidence.config) for each in found.change[:1])


def _by_residency(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Name the tensors that the run's offloads had on the GPU as memory ran out, and the change."""
    failure = evidence.failure
    found = None if failure is None else rows.find(failure, evidence.said, evidence.phase, evidence.offloads)
    if failure is None or found is None or found.first.row.lies != "gpu":
        return _what_stays(evidence), ()
    row, offload, shown_by = found.first
    because = f"; most likely, with {offload.name} ({shown_by}): {row.where}; {row.past}"
    return because, _told(row.change[:1], evidence, failure)


def _what_stays(evidence: Evidence) -> str:
    """Name the tensors left by an offload of weights or states, for a training step out of memory."""
    signs = [(name, evidence.offloads[name]) for name in _OF_STATES if name in evidence.offloads]
    others = evidence.out_of_memory is not None and evidence.out_of_memory.is_shared
    others |= bool(no_effect.of_a_setting(evidence)[0] or ways_around.of_states_on_the_gpu(evidence)[0])
    in_a_step = evidence.phase in (Phase.FIRST_STEP, Phase.LATER)
    if not signs or others or not in_a_step or not _ENGINES.isdisjoint(evidence.offloads):
        return ""
    name, sign = signs[0]
    return (
        f"; {symptoms.load_offloads()[name].name} ({sign}) frees weights or states alone: activations "
        "of all tokens of a micro-batch, the logits, and gradients or gathered weights of the layer at work stay"
    )


def _of_fitting(evidence: Evidence, *, needs_code: bool) -> Conclusion | None:
    """Return the configuration's own finding that shows at the end of this log.

    With `needs_code`, only a finding about the mechanism that raised the exception, or about an optimizer's states
    during their load or save.
    """
    where = code.of(evidence.failure) if evidence.failure is not None else None
    stopped = evidence.failure is not None or any(each.message.kind in _GENERIC for each in evidence.seen)
    rules = {rule.id: rule for rule in load_rules()} if evidence.findings else {}
    fitting = []
    for finding in phases.in_order(tuple(evidence.findings), evidence.phase, failed=stopped):
        of_memory = stopped and finding.effect == "out-of-memory" and not _is_of_memory(evidence)
        if finding.severity is Severity.INFO or of_memory:
            continue
        fits = phases.stops(finding, evidence.phase) if stopped else finding.effect in _SILENT
        # A fault that would have printed its own text is not the reason for another text.
        silent = finding.effect == "crashes-later" or not finding.text
        mechanism = rules[finding.rule].mechanism if finding.rule in rules else ""
        in_its_code = (where is not None and mechanism in where.code.mechanisms) or (
            mechanism == "optimizer-offload" and moments.is_of_states(evidence.failure, evidence.phase)
        )
        if fits and (silent or not stopped) and (in_its_code or not needs_code):
            fitting.append(finding)
    # Of two faults in one offload's code the one that asks more of this run is nearer.
    nearest = (lambda each: len(rules[each.rule].keys)) if needs_code else (lambda each: 0)
    return of_finding(max(fitting, key=nearest)) if fitting else None


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


def _of_mended(shown: Shown, others: Sequence[Shown], evidence: Evidence) -> Conclusion:
    """Return a conclusion about a fault of a library that a later release mends."""
    fix = shown.fix
    sure = f"if this is {' and '.join(shown.depends_on)}, most likely" if shown.depends_on else "most likely"
    by = f"; shown by {', '.join(shown.by)}" if shown.by else ""
    return Conclusion(
        f"{sure} a fault of {fix.package}: {fix.cause}{by}",
        "",
        (*fix.changes[:SHOWN], *ways_around.without_the_option(evidence)),
        others=tuple(f"or {each.fix.cause} ({each.fix.change})" for each in others[:_MOST_OTHERS]),
    )


def _explained(evidence: Evidence, failure: Failure | None) -> symptoms.Explained | None:
    if failure is None:
        return None
    return symptoms.explain(
        failure, evidence.said, evidence.phase, evidence.offloads, resumed=evidence.resumed
    )


def _of_symptom(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return the likeliest meaning of such a failure under an offload that the run has."""
    found = _explained(evidence, failure)
    if found is None:
        return None
    change = _told(found.change, evidence, failure)
    off = symptoms.switched_off(found.offload, evidence.config)
    cause = f"most likely {found.offload.name}, which {found.shown_by} shows: {found.cause.cause}"
    beside, without = ("", ()) if found.cause.is_exact else ways_around.of_a_neighbour(evidence, failure)
    change = (*change[:1], *without, f"or {off}", *ways_around.without_the_option(evidence))
    return Conclusion(cause + beside, "", change)


def _of_residency(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return the tensor missing at the place that the failing code expects, by the places of the run's offloads."""
    found = rows.find(failure, evidence.said, evidence.phase, evidence.offloads, evidence.texts)
    if found is None:
        return None
    row, offload = source_line.of_row(found.first.row, failure, evidence), found.first.offload
    shown = f"most likely {offload.name}, which {found.first.shown_by} shows"
    cause = f"{shown}: {row.where}; {_at(found.moment)}{row.past}"
    beside, without = ways_around.of_a_neighbour(evidence, failure)
    change = (
        *_told(row.change, evidence, failure),
        *without,
        f"or {symptoms.switched_off(offload, evidence.config)}",
    )
    other = found.other
    others = (
        ()
        if other is None
        else (
            f"or {other.offload.name} ({other.shown_by}): {other.row.where}; told apart by "
            f"{symptoms.switched_off(other.offload, evidence.config)}",
        )
    )
    return Conclusion(cause + beside, "", (*change, *ways_around.without_the_option(evidence)), others=others)


def _at(moment: Moment) -> str:
    """Name the trainer's moment, and the place: `in backward (engine.py:12 backward) `."""
    frame = moment.frame
    if frame is None:
        return ""
    file = frame.path.replace("\\", "/").rpartition("/")[2]
    return f"in {moment.name} ({file}:{frame.line} {frame.function}) "


def _told(change: Sequence[str], evidence: Evidence, failure: Failure) -> tuple[str, ...]:
    """Return the change in the user's own words, with the package whose code failed."""
    package = at_fault(evidence) or interfaces.trainer(failure)
    named = [
        each.replace("{package}", package)
        if package
        else each.replace("of {package}", "of the trainer").replace("{package}", "trainer")
        for each in change
    ]
    return tuple(told(each, evidence.dialects, evidence.config) for each in named)


def _of_words(said: own_words.Said | None) -> Conclusion | None:
    """Return the answer of the exception's own words, its frames and its source."""
    return None if said is None else Conclusion(said.cause, "", said.change)


def _unknown(evidence: Evidence, failure: Failure) -> Conclusion:
    """State the facts about an exception of unknown cause, and the experiment that would decide it."""
    who = f"{failure.rank} " if failure.rank else "the run "
    cause = f"not known. {who}ended {evidence.phase} in {failure.text[:300]}"
    where = code.of(failure)
    if where is not None:
        frame = where.frame
        cause += f"; raised through {where.code.name} ({frame.path.rpartition('/')[2]}:{frame.line} {frame.function})"
    elif failure.frames:
        frame = failure.frames[-1]
        cause += f"; raised in {frame.path}:{frame.line} {frame.function}, in no code that offloads"
    named = None
    ran = code.offloads(evidence.config, where.code.mechanisms if where else ())
    offloads = dict.fromkeys(f"{each.written}={each.value}" for each in ran)
    if offloads:
        cause += "; this run offloads by " + ", ".join(offloads)
    elif named := symptoms.sign_in(["offload"], evidence.texts):
        cause += f"; its files say {named}, of which nothing is known"
    elif evidence.config is not None:
        cause += "; the configuration offloads nothing that is known"
    if (kept := rows.there(failure, evidence.phase, evidence.offloads)) is not None:
        cause += f"; at that moment, under {kept.offload.name} ({kept.shown_by}), {kept.row.where}"
    named_option = tuple(
        each.replace("or without", "the same run without")
        for each in ways_around.without_the_option(evidence)
    )
    may_be_an_offload = (
        offloads or named or evidence.offloads.keys() - ways_around.SHARDS or evidence.config is None
    )
    if where is not None and (where.code.mechanisms or may_be_an_offload):
        decide = [each for each in where.code.decide if may_be_an_offload or "offload" not in each]
        return Conclusion(cause, "", (*(decide or _DECIDE_ELSEWHERE), *named_option), is_known=False)
    return Conclusion(
        cause, "", (*_DECIDE, *named_option) if may_be_an_offload else _DECIDE_ELSEWHERE, is_known=False
    )


_DECIDE = (
    "the same run for 3 steps without any offload: if it fails too, no offload is the cause",
    "the whole traceback of the first rank that failed, and the configuration, given to diagnose",
)
_DECIDE_ELSEWHERE = (
    "the exception's own text: nothing here offloads, so no offload is the cause",
    "the whole traceback of the first rank that failed",
)


def _rule(name: str, evidence: Evidence) -> str:
    """Return a message's rule if it is about a framework of this run, or if the framework is unknown."""
    if not name or not evidence.dialects:
        return name
    own = next((rule.dialects for rule in load_rules() if rule.id == name), ())
    return name if set(own) & set(evidence.dialects) else ""
