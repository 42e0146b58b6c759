"""A diagnosis for people (text, Markdown) and for programs (JSON by `schema/diagnosis.schema.json`)."""

import dataclasses
import json
from typing import Any

from skill_tools.diagnosis.diagnosis import Diagnosis, advice
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.units import gib, seconds

SCHEMA_VERSION = "1.0"


def concise(found: Diagnosis, *, planned: bool = False) -> str:
    """Return one line a fact, then what to do next; `planned` says that a plan follows."""
    lines = [_error(found.name, error) for error in found.errors]
    if found.out_of_memory is not None:
        lines.append(f"{found.name}:{found.out_of_memory.line}: {_memory(found.out_of_memory)}")
    if found.host is not None:
        lines.append(
            f"{found.name}:{found.host.line}: host memory: {found.host.what}: {found.host.text[:160]}"
        )
    lines += [f"{found.name}:{each.line}: {each.seen}" for each in found.patterns]
    if found.reported is not None:
        now, most = found.reported
        lines.append(f"reported by the most loaded rank: {gib(now)} allocated, {gib(most)} at most")
    if found.usual_step_s is not None:
        lines.append(f"{len(found.steps)} steps, the usual one {seconds(found.usual_step_s)}")
    if not found.recognised:
        return "\n".join([*lines, f"{found.name}: no problem that this tool knows"])
    following = [f"  {line}" for line in advice(found, planned=planned)]
    return "\n".join([*lines, *(["next:", *following] if following else [])])


def markdown(found: Diagnosis, *, planned: bool = False) -> str:
    """Return the same as a list."""
    return "\n".join(f"- {line.strip()}" for line in concise(found, planned=planned).splitlines())


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
        "host_out_of_memory": dataclasses.asdict(found.host) if found.host else None,
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
    return json.dumps(
        document(found, planned=plan is not None) | {"plan": plan}, indent=2, ensure_ascii=False
    )


def _error(name: str, error: KnownError) -> str:
    rules = ", ".join(f"{rule.id} ({rule.title})" for rule in error.rules)
    sure = "your configuration breaks" if error.confirmed else "known as"
    return f"{name}:{error.line}: {error.text[:160]}\n  {sure} {rules}"


def _memory(memory: OutOfMemory) -> str:
    parts = [f"a CUDA allocation of {gib(memory.tried_bytes)} failed"]
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
