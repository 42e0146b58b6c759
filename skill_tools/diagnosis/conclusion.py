"""Which of all that a log shows is the cause, the rule behind it, and the lines to change.

A rule that the run's own configuration breaks comes first. Then what happened, in the order of `messages.ORDER`, told
by a rule that explains it where the configuration breaks one; then a framework's text that some rule quotes. A text
that both know is told by the rule where the run's own framework is known.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.messages import Message, Seen
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.rules.finding import Finding
from skill_tools.rules.knowledge import Rule
from skill_tools.units import gib

_LATE = frozenset({"hang", "numerics", "slow"})  # kinds that are as often an effect as a cause
_MEMORY = frozenset({"gpu-memory", "host-memory", "killed"})  # kinds whose lines a plan works out better
# Where one tensor of many was asked for: a gap that would hold it does not hold the others.
_FIRST_OF_MANY = frozenset({"adam-states-oom"})
_SHOWN = 2
_DEFRAGMENT = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class Conclusion(NamedTuple):
    """The cause in words, the rule that tells more if there is one, and the lines to change.

    `plans_away` says that a plan's lines, where there are any, take the place of these.
    """

    cause: str
    rule: str
    change: tuple[str, ...]
    plans_away: bool = False


def conclude(
    errors: Sequence[KnownError],
    seen: Sequence[Seen],
    patterns: Sequence[StepPattern],
    out_of_memory: OutOfMemory | None,
    findings: Sequence[Finding],
) -> Conclusion | None:
    """Return the conclusion, or None where nothing in the log is known."""
    broken = {finding.rule: finding for finding in findings}
    for error in errors:
        if error.confirmed:
            return _of_finding(broken[error.confirmed[0]])
    same_text = [error for error in errors if error.of_the_run and seen and error.line == seen[0].line]
    if same_text:
        return _of_rule(same_text[0].rules[0])
    if seen and (seen[0].message.kind not in _LATE or not errors):
        return _of_message(seen[0].message, errors, out_of_memory, broken.values())
    if errors:
        return _of_rule(errors[0].rules[0])
    if patterns:
        return Conclusion(f"{patterns[0].seen}: {patterns[0].points_to}", patterns[0].rule, ())
    return None


def _of_message(
    message: Message,
    errors: Sequence[KnownError],
    out_of_memory: OutOfMemory | None,
    findings: Iterable[Finding],
) -> Conclusion:
    for finding in findings:
        if finding.rule in message.explained_by:
            return _of_finding(finding)._replace(plans_away=message.kind in _MEMORY)
    fragments = out_of_memory.unallocated_bytes if out_of_memory and out_of_memory.is_fragmented else None
    if message.kind == "gpu-memory" and fragments is not None and message.id not in _FIRST_OF_MANY:
        cause = f"fragmentation: {gib(fragments)} was reserved and unused, more than was asked for"
        return Conclusion(cause, message.rule, (_DEFRAGMENT, *message.change)[:_SHOWN])
    rule = message.rule or next((error.rules[0].id for error in errors), "")
    return Conclusion(message.cause, rule, message.change, plans_away=message.kind in _MEMORY)


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
