# SPDX-License-Identifier: Apache-2.0
"""The possible cards of an unnamed GPU: those of a memory size, or, without one, an assumed one.

Cards are sold by a label (24 GB). torch reports less, the memory left by ECC and the driver (22.0 to 23.7 GiB). A log's
capacity, or a budget of such a size, means the cards of that label. Another budget may be a part of any card at most
twice as large.
"""

from collections.abc import Iterable
from typing import Any

from skill_tools import knowledge
from skill_tools.planning.cost import machine
from skill_tools.planning.cost.machine import Machine
from skill_tools.units import GB, GIB

ASSUMED = "h100"  # without a memory size
LABELS_GB = (8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 256, 288)
_MORE = 1.01  # a label is in GiB, and no card has more
_IS_ONE = 0.015  # a budget so close to a label, or to a card's memory, means that card
_MOST = 2  # the largest card, in budgets that are a part of one


def label_gb(memory_bytes: float) -> int:
    """Return the label in GB under which a card of so many bytes is sold; the largest for more."""
    return next((label for label in LABELS_GB if memory_bytes <= _MORE * label * GIB), LABELS_GB[-1])


def smallest_label_gb(needed_bytes: float) -> int | None:
    """Return the smallest label whose known cards all have `needed_bytes`; None if no card has so many."""
    least: dict[int, float] = {}
    for card in _cards().values():
        size = card["memory_gib"] * GIB
        least[label_gb(size)] = min(size, least.get(label_gb(size), size))
    return next((label for label in sorted(least) if least[label] >= needed_bytes), None)


def standing_for(memory_bytes: int | None, *, is_capacity: bool, ranks_on_node: int) -> Machine:
    """Return the machine whose rates stand for all possible cards; it names the cards.

    `memory_bytes` are a card's whole memory if `is_capacity`, else a budget.
    """
    names = _meant(memory_bytes, is_capacity=is_capacity) or (ASSUMED,)
    middle = ASSUMED if ASSUMED in names else sorted(names, key=_speed)[len(names) // 2]
    return machine.known(middle, ranks_on_node=ranks_on_node)._replace(stands_for=names)


def _meant(memory_bytes: int | None, *, is_capacity: bool) -> tuple[str, ...]:
    if memory_bytes is None:
        return ()
    cards = _cards()
    own = [label * GIB for label in LABELS_GB] + [card["memory_gib"] * GIB for card in cards.values()]
    is_label = memory_bytes in [label * GB for label in LABELS_GB]  # 24GB, as cards are sold
    if is_capacity or is_label or any(abs(memory_bytes - size) <= _IS_ONE * size for size in own):
        label = label_gb(memory_bytes)
        return _of(name for name, card in cards.items() if label_gb(card["memory_gib"] * GIB) == label)
    sizes = ((name, card["memory_gib"] * GIB) for name, card in cards.items())
    return _of(name for name, size in sizes if memory_bytes <= size <= _MOST * memory_bytes)


def _of(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_speed, reverse=True))


def _speed(name: str) -> float:
    speed: float = _cards()[name]["bf16_tflops"]
    return speed


def _cards() -> dict[str, dict[str, Any]]:
    cards: dict[str, dict[str, Any]] = knowledge.index()["hardware"]["gpus"]
    return cards
