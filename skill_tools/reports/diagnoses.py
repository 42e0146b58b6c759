# SPDX-License-Identifier: Apache-2.0
"""A diagnosis for people (text, Markdown) and for programs (JSON by `schema/diagnosis.schema.json`)."""

import dataclasses
import json
from typing import Any

from skill_tools.diagnosis import memory_owners, phases
from skill_tools.diagnosis.diagnosis import Diagnosis, advice, host_need
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.errors import printable_json
from skill_tools.rules.finding import Finding, Severity
from skill_tools.started import COMMAND
from skill_tools.units import gib, seconds

SCHEMA_VERSION = "1.0"
_MOST_FACTS = 5
_WIDTH = 160


def concise(found: Diagnosis, *, planned: bool = False, mended: bool = False, others: str = "") -> str:
    """Return the observation, then the cause, its rule and the lines to change.

    `planned`: a plan follows; `mended`: it has lines to change, and there must not be two answers. `others` is a line
    on host memory that no plan would free.
    """
    lines = [*_seen(found), *([others] if others else [])]
    if found.reported is not None:
        now, most = found.reported
        lines.append(f"reported by the most loaded rank: {gib(now)} allocated, {gib(most)} at most")
    if found.usual_step_s is not None:
        lines.append(f"{len(found.steps)} steps, the usual one {seconds(found.usual_step_s)}")
    if found.releases:
        lines.append(f"releases: {found.releases}")
    conclusion = found.conclusion
    if conclusion is None:
        return "\n".join([*lines, f"{found.name}: {_quiet(found)}", *_findings(found), *_suspects(found)])
    lines.append(f"cause: {conclusion.cause}")
    if conclusion.rule:
        lines.append(f"rule: {conclusion.rule} ({COMMAND} explain {conclusion.rule})")
    if need := host_need(found):
        lines.append(need)
    if conclusion.change and not (mended and conclusion.plans_away):
        heading = "change:" if conclusion.is_known else "to decide it:"
        lines += [heading, *(f"  {line}" for line in conclusion.change)]
    lines += conclusion.others
    if found.host_ran_out and found.owners.of_the_host:
        lines.append(f"ask: {memory_owners.ASK}")
    lines += _findings(found)
    following = [f"  {line}" for line in advice(found, planned=planned or bool(others))]
    return "\n".join([*lines, *(["next:", *following] if following else [])])


def _quiet(found: Diagnosis) -> str:
    """Say of a log that nothing is known of whether its configuration, or its offload, has something to look at."""
    if _shown_findings(found):
        return "the configuration has findings of its own"
    return "no failure in this log" if found.suspects else "no problem that this tool knows"


def _suspects(found: Diagnosis) -> list[str]:
    """Return the first suspects of a run without a failure, by the complaint about it."""
    lines = []
    for complaint, suspects in found.suspects.items():
        lines.append(f"if {complaint}, look first at:")
        for each in suspects:
            lines += [f"  {each.cause}", f"    {each.check}"]
    return lines


def _shown_findings(found: Diagnosis) -> tuple[Finding, ...]:
    """Return the configuration's further findings, beside the conclusion.

    If nothing failed, findings of information about wrong numbers are suspects.
    """
    told = found.conclusion.rule if found.conclusion else ""
    return tuple(
        finding
        for finding in found.findings
        if finding.rule != told and finding.severity is not Severity.INFO
    )


def _findings(found: Diagnosis) -> list[str]:
    """Return a line on each of the configuration's own findings: its place, its trace in a log, and its message."""
    told = _shown_findings(found)
    if not told:
        return []
    passed = [finding for finding in told if phases.is_past(finding, found.phase, began=found.began)]
    shown = [finding for finding in told if finding not in passed]
    lines = [
        f"  {finding.place} {finding.severity} {finding.rule}: {phases.when(finding)}; {_cut(finding.message)}"
        for finding in shown[:_MOST_FACTS]
    ]
    more = len(shown) - _MOST_FACTS
    command = f"{COMMAND} lint shows them whole"
    lines += [f"  {more} more; {command}"] if more > 0 else []
    if passed:
        lines.append(
            f"  {len(passed)} would stop a run at its start, which this run passed: another release, or a fork, "
            f"read {passed[0].place.file}; {command}"
        )
    return ["the configuration's own:", *lines]


def _seen(found: Diagnosis) -> list[str]:
    """Return one line a fact, in the order of the log; a line that a rule and a message know is said once."""
    facts: dict[int, str] = {error.line: _error(found.name, error) for error in found.errors}
    for seen in found.messages:
        facts.setdefault(seen.line, f"{found.name}:{seen.line}: {_cut(seen.text)}")
    for pattern in found.patterns:
        facts.setdefault(pattern.line, f"{found.name}:{pattern.line}: {pattern.seen}")
    memory = found.out_of_memory
    if memory is not None:
        facts[memory.line] = f"{found.name}:{memory.line}: {_cut(memory.text)}\n  {_memory(memory)}"
    ordered = [facts[line] for line in sorted(facts)]
    more = len(ordered) - _MOST_FACTS
    return [
        *ordered[:_MOST_FACTS],
        *([f"{more} more known lines (--format json lists them)"] if more > 0 else []),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def markdown(found: Diagnosis, *, planned: bool = False, mended: bool = False, others: str = "") -> str:
    """Return the same as a list."""
    lines = concise(found, planned=planned, mended=mended, others=others).splitlines()
    return "\n".join(f"- {line.strip()}" for line in lines)


def document(found: Diagnosis, *, planned: bool = False) -> dict[str, Any]:
    """Return the JSON document as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "log": found.name,
        "recognised": found.recognised,
        "errors": [
            {
                "line": error.line,
                "text": error.text,
                "rules": [
                    {
                        "rule": rule.id,
                        "title": rule.title,
                        "why": rule.why,
                        "next": rule.next,
                        "docs": rule.docs,
                    }
                    for rule in error.rules
                ],
                "confirmed": list(error.confirmed),
            }
            for error in found.errors
        ],
        "out_of_memory": _memory_data(found.out_of_memory),
        "host_out_of_memory": {
            "line": found.host.line,
            "text": found.host.text,
            "what": found.host.message.cause,
        }
        if found.host
        else None,
        "messages": [
            {
                "id": seen.message.id,
                "kind": seen.message.kind,
                "role": seen.message.role,
                "line": seen.line,
                "text": seen.text,
                "cause": seen.message.cause,
                "change": list(seen.message.change),
                "rule": seen.message.rule,
                "source": seen.message.source,
            }
            for seen in found.messages
        ],
        "conclusion": found.conclusion
        and {
            "cause": found.conclusion.cause,
            "rule": found.conclusion.rule,
            "change": list(found.conclusion.change),
            "known": found.conclusion.is_known,
            "others": list(found.conclusion.others),
        },
        "suspects": [
            {"if": complaint, **each._asdict()}
            for complaint, suspects in found.suspects.items()
            for each in suspects
        ],
        "failure": found.failure
        and {
            "rank": found.failure.rank,
            "error": found.failure.error,
            "text": found.failure.text,
            "phase": found.phase.value,
            "frames": [frame._asdict() for frame in found.failure.frames],
            "releases": found.releases,
        },
        "findings": [
            {
                "rule": finding.rule,
                "severity": finding.severity.value,
                "place": str(finding.place),
                "message": finding.message,
                "in_a_log": phases.when(finding),
            }
            for finding in found.findings
        ],
        "host_owners": list(found.owners.of_the_host),
        "machine": {"gpu": found.gpu, "host_bytes": found.host_bytes},
        "parameters": found.parameters._asdict() | {"model": found.model} if found.parameters else None,
        "reported_bytes": {"allocated": found.reported[0], "max_allocated": found.reported[1]}
        if found.reported
        else None,
        "steps": {
            "count": len(found.steps),
            "median_s": found.usual_step_s,
        },
        "patterns": [dataclasses.asdict(each) for each in found.patterns],
        "next": list(advice(found, planned=planned)),
    }


def as_json(found: Diagnosis, plan: dict[str, Any] | None) -> str:
    """Return the document as text, with the plan that it handed over to, if any."""
    data = document(found, planned=plan is not None) | {"plan": plan}
    return printable_json(json.dumps(data, indent=2, ensure_ascii=False))


def _error(name: str, error: KnownError) -> str:
    rules = ", ".join(f"{rule.id} ({rule.title})" for rule in error.rules)
    sure = "your configuration breaks" if error.confirmed else "known as"
    return f"{name}:{error.line}: {_cut(error.text)}\n  {sure} {rules}"


def _memory(memory: OutOfMemory) -> str:
    article = "an" if memory.device in {"NPU", "XPU"} else "a"
    parts = [f"{article} {memory.device} allocation of {gib(memory.tried_bytes)} failed"]
    named = (
        ("capacity", memory.total_bytes),
        ("free", memory.free_bytes),
        ("allocated", memory.allocated_bytes),
        ("reserved and unused", memory.unallocated_bytes),
    )
    parts += [f"{name} {gib(amount)}" for name, amount in named if amount is not None]
    if memory.count > 1:
        parts.append(f"{memory.count} such messages")
    return ", ".join(parts)


def _memory_data(memory: OutOfMemory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return dataclasses.asdict(memory) | {
        "needed_bytes": memory.needed_bytes,
        "fragmented": memory.is_fragmented,
    }
