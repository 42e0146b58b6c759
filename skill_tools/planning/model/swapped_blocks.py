# SPDX-License-Identifier: Apache-2.0
"""The memory of a run whose blocks swap, at each number of blocks: what a GPU has left for activations.

Apart because no other plan counts a model in blocks, nor answers with room instead of a sum.
"""

from typing import NamedTuple

from skill_tools.dialects.block_swap.swapping import BlockSwap
from skill_tools.planning.cost.machine import Machine


class Count(NamedTuple):
    """One `--blocks_to_swap`: bytes of weights and LoRA on the GPU, its room for activations, bytes on the host.

    `moved_bytes` are those of all blocks that swap, once.
    """

    blocks: int
    device_bytes: int
    room_bytes: int
    host_bytes: int
    moved_bytes: int


def counts(swap: BlockSwap, usable_bytes: int) -> tuple[Count, ...]:
    """Return each legal number of blocks from 0; weights, LoRA and activations may take `usable_bytes` of the GPU."""
    return tuple(
        _count(swap, blocks, usable_bytes) for blocks in range(swap.most + 1) if swap.is_allowed(blocks)
    )


def _count(swap: BlockSwap, blocks: int, usable_bytes: int) -> Count:
    parts = list(zip(swap.lists, swap.split(blocks), strict=True))
    weights = swap.rest_bytes + sum(each.length * each.stays_bytes for each in swap.lists)
    weights += sum((each.length - out + min(swap.ring, out)) * each.moved_bytes for each, out in parts)
    moved = sum(out * each.moved_bytes for each, out in parts)
    device = weights + swap.lora_bytes
    return Count(blocks, device, usable_bytes - device, moved + swap.inactive_bytes, moved)


def link_s(swap: BlockSwap, bytes_moved: int, where: Machine) -> float:
    """Return the seconds that the link takes for blocks of `bytes_moved`, once in, and once out where they go back."""
    one_way = bytes_moved / where.h2d_copy
    return one_way if swap.is_one_way else one_way + bytes_moved / where.d2h_copy
