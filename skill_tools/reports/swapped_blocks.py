# SPDX-License-Identifier: Apache-2.0
"""The answer how much of a model to keep on the host, as text or as JSON: the setting, the room, then its grounds."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from skill_tools.dialects.block_swap.on_host import OnHost
from skill_tools.errors import printable_json
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model.swapped_blocks import Count, link_s
from skill_tools.units import gib, seconds

_SAME = 1e-6  # of two shares in hundredths
_TIMES = {2: "twice", 3: "three times"}


class Answer(NamedTuple):
    """All allowed `counts` from 0, and the first one with room for `activations_bytes`, or None."""

    dialect: str
    on_host: OnHost
    counts: Sequence[Count]
    chosen: Count | None
    activations_bytes: int
    is_assumed: bool
    gpu_bytes: int
    reserved_bytes: int
    host_limit_bytes: int | None
    where: Machine
    notes: Sequence[str]


def as_text(answer: Answer) -> str:
    """Return the answer as lines."""
    return "\n".join([_headline(answer), _activations(answer), _rooms(answer), *_grounds(answer)])


def _headline(answer: Answer) -> str:
    run, chosen, most = answer.on_host.run, answer.chosen, answer.counts[-1]
    of = f"{run.label}, {run.weights} weights, LoRA of rank {run.rank}, {gib(answer.gpu_bytes)} a GPU"
    if chosen is None:
        return f"nothing fits: {run.option} {_value(answer, most.value)}{run.beside}, the most, {_room(most)} ({of})"
    value, limit = _value(answer, chosen.value), _value(answer, most.value)
    return (
        f"{run.option} {value}{run.beside if chosen.value else ''} of at most {limit}: {_room(chosen)} ({of})"
    )


def _value(answer: Answer, value: float) -> str:
    return f"{value:.2f}" if answer.on_host.unit == "share" else f"{value:.0f}"


def _room(count: Count) -> str:
    if count.room_bytes < 0:
        return f"lacks {gib(-count.room_bytes)} before any activation"
    return f"leaves {gib(count.room_bytes)} for activations"


def _activations(answer: Answer) -> str:
    given = gib(answer.activations_bytes)
    if not answer.is_assumed:
        return f"asked: {given} for activations (--activation-memory)"
    return (
        f"assumed: {given} for activations, about an image of 1 megapixel with checkpointing; no trace says it, and "
        "videos take more; --activation-memory with yours"
    )


def _rooms(answer: Answer) -> str:
    """Return the room at some values: the ends, quarters, the chosen one and the input's own."""
    last = len(answer.counts) - 1
    at = {answer.counts[last * part // 4] for part in range(5)} | (
        {answer.chosen} if answer.chosen else set()
    )
    given = answer.on_host.run.asked
    asked = [each for each in answer.counts if abs(each.value - given) < _SAME]
    shown = sorted({*at, *asked})
    rooms = (f"{_value(answer, each.value)}: {_signed(each.room_bytes)}" for each in shown)
    now = f"; the input has {_value(answer, given)}" if given else ""
    now += ", which the trainer refuses" if now and not asked else ""
    return f"room by {answer.on_host.unit}: {', '.join(rooms)}{now}"


def _signed(room_bytes: int) -> str:
    return gib(room_bytes) if room_bytes >= 0 else f"-{gib(-room_bytes)}"


def _grounds(answer: Answer) -> list[str]:
    run = answer.on_host.run
    shown = answer.chosen or answer.counts[-1]
    sizes = ", ".join(
        f"{each.length} {each.name} of {each.moved_bytes / 2**20:.0f} MiB" for each in run.lists
    )
    lines = [
        f"weights and LoRA take {gib(shown.device_bytes)} of the GPU; blocks: {sizes}; LoRA {gib(run.lora_bytes)}; "
        f"set aside {gib(answer.reserved_bytes)} for CUDA and headroom; on the host {gib(shown.host_bytes)}"
    ]
    if answer.host_limit_bytes is not None and shown.host_bytes > answer.host_limit_bytes:
        lines[0] += f", which has {gib(answer.host_limit_bytes)}"
    buffers = next((each.buffer_bytes for each in answer.on_host.steps() if each.value == shown.value), 0)
    if buffers:
        lines[0] += f"; {gib(buffers)} of buffers on the GPU are counted"
    if shown.moved_bytes and not answer.where.stands_for:
        once = link_s(run, shown.moved_bytes, answer.where)
        ways = "in" if run.is_one_way else "in and out"
        slower = "" if run.is_pinned else "; memory that is not pinned is slower"
        lines.append(
            f"link ({answer.where.name}): {seconds(once)} for {gib(shown.moved_bytes)} {ways}, "
            f"{_TIMES[run.times]} a step: {seconds(run.times * once)}, of which compute hides a part{slower}"
        )
    return [*lines, f"counted: {'; '.join((*run.assumptions, *answer.notes))}"]


def as_json(answer: Answer) -> str:
    """Return the document of `schema/plan.schema.json` with kind `block-swap`."""
    run, chosen, unit = answer.on_host.run, answer.chosen, answer.on_host.unit
    errors = [] if chosen else [{"kind": "nothing-fits", "message": _headline(answer)}]
    document = {
        "schema_version": "1.0",
        "errors": errors,
        "kind": "block-swap",
        "dialect": answer.dialect,
        "block_swap": {
            "model": run.label,
            "option": run.option,
            unit: chosen.value if chosen else None,
            "activation_bytes": answer.activations_bytes,
            "activations_are_assumed": answer.is_assumed,
            "counts": [_as_row(each, unit) for each in answer.counts],
            "assumptions": [*run.assumptions, *answer.notes],
        },
    }
    return printable_json(json.dumps(document, indent=2, ensure_ascii=False))


def _as_row(count: Count, unit: str) -> dict[str, float]:
    sizes = count._asdict()
    return {unit: sizes.pop("value"), **sizes}
