# SPDX-License-Identifier: Apache-2.0
"""Words and JSON for memory snapshots: each owner's bytes on each device, beside a plan, or beside another snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from offload_watch.report import Planned
from skill_tools.snapshots.snapshot import UNKNOWN, Held, Holder
from skill_tools.units import gib

_MOST_HOLDERS = 12
# A plan's activations: all that a step makes and drops.
_STEP_S_OWN = ("activations", "recomputation", "work of backward", "work of the update", "the rest")
# Owners that only a plan of FSDP or of streamed layers tells apart.
_WEIGHTS = ("weights", "gathered weights")


def concise(held: Sequence[Held], plan: Planned | None) -> str:
    """Return a table of owners and one of the lines that hold most, for each device."""
    return "\n\n".join("\n".join(_device(each, plan)) for each in held)


def _device(held: Held, plan: Planned | None) -> list[str]:
    lines = [f"GPU {held.device}: {gib(held.total_bytes)} {held.moment}"]
    if held.wanted_bytes is not None:
        lines.append(
            f"not there: {gib(held.wanted_bytes)} more, asked for at {held.place or 'no recorded line'}"
        )
    lines += [f"  {owner:<26} {gib(size_bytes):>10}" for owner, size_bytes in held.by_owner().items()]
    if plan is not None:
        lines.append(f"beside the plan ({plan.label}), {gib(plan.peak_bytes)} at its peak:")
        for owner, (seen_bytes, planned_bytes) in against(held, plan).items():
            more = seen_bytes - planned_bytes
            lines.append(
                f"  {owner:<26} {gib(seen_bytes):>10}, planned {gib(planned_bytes)}"
                f" ({'+' if more >= 0 else '-'}{gib(abs(more))})"
            )
    lines.append("held most:")
    for holder, (size_bytes, count) in list(held.by_holder.items())[:_MOST_HOLDERS]:
        blocks = f"{count} block{'s' * (count != 1)}"
        lines.append(f"  {gib(size_bytes):>10} in {blocks}, {holder.owner}{_at(holder)}")
    if held.is_cut or UNKNOWN in held.by_owner():
        lines.append(
            "not all allocations were recorded: begin _record_memory_history() before the model is made, or raise "
            "max_entries"
        )
    return lines


def _at(holder: Holder) -> str:
    return f": {holder.place}" if holder.place else ""


def against(held: Held, plan: Planned) -> dict[str, tuple[int, int]]:
    """Return the bytes of each owner that a plan knows, seen and planned; a step's temporary memory is one owner."""
    seen = held.by_owner()
    pairs = {
        "weights": (_WEIGHTS, ("weights", "frozen weights")),
        "activations": (_STEP_S_OWN, ("activations",)),
    }
    pairs |= {each: ((each,), (each,)) for each in ("gradients", "optimizer states")}
    found = {
        owner: (sum(seen.get(each, 0) for each in ours), sum(plan.device.get(each, 0) for each in theirs))
        for owner, (ours, theirs) in pairs.items()
    }
    return {owner: both for owner, both in found.items() if any(both)}


def difference(before: Sequence[Held], after: Sequence[Held]) -> str:
    """Return the differences of two snapshots, by owner and by line, the largest change first."""
    earlier = {each.device: each for each in before}
    parts = []
    for each in after:
        other = earlier.pop(each.device, None)
        if other is None:
            parts.append(f"GPU {each.device}: only in the second, {gib(each.total_bytes)}")
            continue
        lines = [
            f"GPU {each.device}: {gib(other.total_bytes)} {other.moment}, then {gib(each.total_bytes)} {each.moment} "
            f"({_signed(each.total_bytes - other.total_bytes)})"
        ]
        lines += [
            f"  {_signed(more):>11} {owner}" for owner, more in _changes(other.by_owner(), each.by_owner())
        ]
        places = [
            f"  {_signed(more):>11} {holder.owner}{_at(holder)}"
            for holder, more in _changes(_sizes(other), _sizes(each))[:_MOST_HOLDERS]
        ]
        parts.append("\n".join([*lines, *(["changed most:", *places] if places else ["the same holders"])]))
    parts += [f"GPU {device}: only in the first" for device in earlier]
    return "\n\n".join(parts)


def _sizes(held: Held) -> dict[Holder, int]:
    return {holder: size_bytes for holder, (size_bytes, _) in held.by_holder.items()}


def _changes(before: Mapping[Any, int], after: Mapping[Any, int]) -> list[tuple[Any, int]]:
    changes = {each: after.get(each, 0) - before.get(each, 0) for each in [*before, *after]}
    return sorted(((each, more) for each, more in changes.items() if more), key=lambda each: -abs(each[1]))


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes >= 0 else '-'}{gib(abs(size_bytes))}"


def as_json(snapshots: Sequence[Sequence[Held]], plan: Planned | None) -> str:
    """Return all that was read, in bytes: a list of devices for each snapshot."""
    return json.dumps(
        {"schema_version": "1.0", "snapshots": [[_data(each, plan) for each in one] for one in snapshots]}
    )


def _data(held: Held, plan: Planned | None) -> dict[str, Any]:
    return {
        "device": held.device,
        "moment": held.moment,
        "total_bytes": held.total_bytes,
        "wanted_bytes": held.wanted_bytes,
        "wanted_at": held.place,
        "owners": held.by_owner(),
        "holders": [
            {"owner": holder.owner, "place": holder.place, "bytes": size_bytes, "blocks": count}
            for holder, (size_bytes, count) in held.by_holder.items()
        ],
        "against_plan": None
        if plan is None
        else {
            owner: {"seen_bytes": seen, "planned_bytes": planned}
            for owner, (seen, planned) in against(held, plan).items()
        },
    }
