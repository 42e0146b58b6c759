# SPDX-License-Identifier: Apache-2.0
"""The part of the frozen weights that stays on the device, and the pinned part of the rest.

Resident storages are spread evenly: every block keeps the same share of its bytes, as far as whole storages allow.
Whole layers at one end instead would leave the link idle beside them and too slow beside the others. The buffers for
the rest would have to be as large as a whole block.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_STEPS = 256


def kept(sizes: Sequence[int], allowance_bytes: int) -> list[bool]:
    """Return for each storage of a block whether it stays: the largest first, within `allowance_bytes`."""
    keep = [False] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] <= allowance_bytes:
            keep[index] = True
            allowance_bytes -= sizes[index]
    return keep


def fraction_of_layers(resident_layers: int, layers: int) -> float:
    """Return which share of all bytes so many layers' worth is. Raises ValueError for more layers than there are."""
    if not 0 <= resident_layers <= layers:
        raise ValueError(
            f"resident_layers={resident_layers}; expected 0 to {layers}, the blocks of the model; "
            f"try {min(max(resident_layers, 0), layers)}"
        )
    return resident_layers / layers


def allowances(blocks: Sequence[Sequence[int]], fraction: float) -> list[int]:
    """Return the bytes that each block may keep, so that at most `fraction` of all bytes stay.

    Bytes that a block cannot use, because no whole storage fits, go to the next one.
    """
    left_bytes = 0.0
    result = []
    for sizes in blocks:
        left_bytes += fraction * sum(sizes)
        result.append(int(left_bytes))
        left_bytes -= kept_bytes(sizes, result[-1])
    return result


def kept_bytes(sizes: Sequence[int], allowance_bytes: int) -> int:
    """Return the bytes of a block that stay."""
    keep = kept(sizes, allowance_bytes)
    return sum(size for size, is_kept in zip(sizes, keep, strict=True) if is_kept)


def streamed_bytes(blocks: Sequence[Sequence[int]], fraction: float) -> tuple[int, int]:
    """Return the bytes of all `blocks` that do not stay where `fraction` of them may, and the most of one block."""
    rests = [
        sum(sizes) - kept_bytes(sizes, allowance)
        for sizes, allowance in zip(blocks, allowances(blocks, fraction), strict=True)
    ]
    return sum(rests), max(rests)


def device_bytes(blocks: Sequence[Sequence[int]], fraction: float, window_blocks: int) -> int:
    """Return the device bytes of frozen weights: all that stays, and `window_blocks` buffers of the largest rest."""
    streamed, largest = streamed_bytes(blocks, fraction)
    return sum(map(sum, blocks)) - streamed + window_blocks * largest


def fraction_within(
    blocks: Sequence[Sequence[int]], budget_bytes: int, window_blocks: int, *, beside_bytes: int = 0
) -> float:
    """Return the largest share that may stay within `budget_bytes`, the window and `beside_bytes` included.

    Raises ValueError when no share fits.
    """
    for step in range(_STEPS, -1, -1):
        if beside_bytes + device_bytes(blocks, step / _STEPS, window_blocks) <= budget_bytes:
            return step / _STEPS
    # Share 0 does not always need least: resident storages make the largest rest smaller, and so the window.
    least = beside_bytes + min(
        device_bytes(blocks, step / _STEPS, window_blocks) for step in range(_STEPS + 1)
    )
    raise ValueError(
        f"budget_bytes={budget_bytes} is too small; expected at least {least}, which {window_blocks} blocks take; "
        f"try budget_bytes={least} or a smaller prefetch"
    )


def pinned_within(sizes: Sequence[int], limit_bytes: int, *, seldom: Collection[int] = ()) -> list[bool]:
    """Return which blocks of `sizes` are pinned within `limit_bytes`, spread evenly over all.

    The blocks of `seldom`, by their indices, are pinned if all others are.
    """
    pinned = [False] * len(sizes)
    often = [index for index in range(len(sizes)) if index not in seldom]
    for group in (often, sorted(seldom)):
        fits = _spread([sizes[index] for index in group], limit_bytes)
        for index, fit in zip(group, fits, strict=True):
            pinned[index] = fit
            limit_bytes -= sizes[index] if fit else 0
        if not all(fits):
            break
    return pinned


def copied_once(blocks: int, window_blocks: int) -> set[int]:
    """Return the blocks that a step copies once, and all others twice.

    The last are still there at the turn from forward to backward, and the first at that from step to step.
    """
    return {*range(min(window_blocks, blocks)), *range(max(blocks - window_blocks, 0), blocks)}


def _spread(sizes: Sequence[int], limit_bytes: int) -> list[bool]:
    """Return which of `sizes` fit into `limit_bytes`, spread evenly."""
    total_bytes, seen_bytes, pinned_bytes = sum(sizes), 0, 0
    pinned = []
    for size in sizes:
        seen_bytes += size
        fits = (pinned_bytes + size) * total_bytes <= limit_bytes * seen_bytes
        pinned.append(fits)
        pinned_bytes += size if fits else 0
    return pinned
