# SPDX-License-Identifier: Apache-2.0
"""The answer how many blocks to swap, as text or as JSON: the flag, the room for activations, then its grounds."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from skill_tools.dialects.block_swap.swapping import BlockSwap
from skill_tools.errors import printable_json
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model.swapped_blocks import Count, link_s
from skill_tools.units import gib, seconds

_OPTION = "--blocks_to_swap"


class Answer(NamedTuple):
    """`counts` from 0 to the most blocks, and the first of them that leaves `activations_bytes`, or None."""

    dialect: str
    swap: BlockSwap
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
    swap, chosen, most = answer.swap, answer.chosen, answer.counts[-1]
    of = f"{swap.label}, {swap.weights} weights, LoRA of rank {swap.rank}, {gib(answer.gpu_bytes)} a GPU"
    if chosen is None:
        return f"nothing fits: {_OPTION} {most.blocks}, the most, {_room(most)} ({of})"
    return f"{_OPTION} {chosen.blocks} of at most {most.blocks}: {_room(chosen)} ({of})"


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
    """Return the room at some numbers of blocks: the ends, quarters, the chosen one and the input's own."""
    last = len(answer.counts) - 1
    at = {answer.counts[last * part // 4] for part in range(5)} | (
        {answer.chosen} if answer.chosen else set()
    )
    asked = [each for each in answer.counts if each.blocks == answer.swap.asked]
    rooms = (f"{each.blocks}: {_signed(each.room_bytes)}" for each in sorted({*at, *asked}))
    now = f"; the input swaps {answer.swap.asked}" if answer.swap.asked else ""
    now += ", which the trainer refuses" if now and not asked else ""
    return f"room by blocks: {', '.join(rooms)}{now}"


def _signed(room_bytes: int) -> str:
    return gib(room_bytes) if room_bytes >= 0 else f"-{gib(-room_bytes)}"


def _grounds(answer: Answer) -> list[str]:
    swap = answer.swap
    shown = answer.chosen or answer.counts[-1]
    sizes = ", ".join(
        f"{each.length} {each.name} of {each.moved_bytes / 2**20:.0f} MiB" for each in swap.lists
    )
    lines = [
        f"weights and LoRA take {gib(shown.device_bytes)} of the GPU; blocks: {sizes}; LoRA {gib(swap.lora_bytes)}; "
        f"set aside {gib(answer.reserved_bytes)} for CUDA and headroom; on the host {gib(shown.host_bytes)}"
    ]
    if answer.host_limit_bytes is not None and shown.host_bytes > answer.host_limit_bytes:
        lines[0] += f", which has {gib(answer.host_limit_bytes)}"
    if swap.ring:
        lines[0] += f"; {swap.ring} buffers of the ring of each list are counted"
    if shown.moved_bytes and not answer.where.stands_for:
        once = link_s(swap, shown.moved_bytes, answer.where)
        ways = "in" if swap.is_one_way else "in and out"
        slower = "" if swap.is_pinned else "; memory that is not pinned is slower"
        lines.append(
            f"link ({answer.where.name}): {seconds(once / shown.blocks)} for each of the {shown.blocks} blocks {ways}, "
            f"twice a step: {seconds(2 * once)}, of which compute hides a part{slower}"
        )
    return [*lines, f"counted: {'; '.join((*swap.assumptions, *answer.notes))}"]


def as_json(answer: Answer) -> str:
    """Return the document of `schema/plan.schema.json` with kind `block-swap`."""
    swap, chosen = answer.swap, answer.chosen
    errors = [] if chosen else [{"kind": "nothing-fits", "message": _headline(answer)}]
    document = {
        "schema_version": "1.0",
        "errors": errors,
        "kind": "block-swap",
        "dialect": answer.dialect,
        "block_swap": {
            "model": swap.label,
            "option": _OPTION,
            "blocks": chosen.blocks if chosen else None,
            "activation_bytes": answer.activations_bytes,
            "activations_are_assumed": answer.is_assumed,
            "counts": [each._asdict() for each in answer.counts],
            "assumptions": [*swap.assumptions, *answer.notes],
        },
    }
    return printable_json(json.dumps(document, indent=2, ensure_ascii=False))
