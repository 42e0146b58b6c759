# SPDX-License-Identifier: Apache-2.0
"""The room for activations in a run with swapped blocks or layers, at each value of its setting.

Apart because no other plan counts a model in blocks, nor answers with room instead of a sum.
"""

from typing import NamedTuple

from skill_tools.dialects.block_swap.on_host import OnHost, Run, Step
from skill_tools.planning.cost.machine import Machine


class Count(NamedTuple):
    """One value: bytes of weights and LoRA on the GPU, its room for activations, bytes on the host.

    `moved_bytes` are those of all weights that leave, once.
    """

    value: float
    device_bytes: int
    room_bytes: int
    host_bytes: int
    moved_bytes: int


def counts(on_host: OnHost, usable_bytes: int) -> tuple[Count, ...]:
    """Return each legal value from 0; weights, LoRA and activations may take `usable_bytes` of the GPU."""
    run = on_host.run
    whole = run.rest_bytes + sum(each.length * (each.moved_bytes + each.stays_bytes) for each in run.lists)
    return tuple(_count(run, step, whole, usable_bytes) for step in on_host.steps())


def _count(run: Run, step: Step, whole_bytes: int, usable_bytes: int) -> Count:
    device = whole_bytes - step.moved_bytes + step.buffer_bytes + run.lora_bytes
    return Count(
        step.value, device, usable_bytes - device, step.moved_bytes + run.inactive_bytes, step.moved_bytes
    )


def link_s(run: Run, bytes_moved: int, where: Machine) -> float:
    """Return the link's seconds for weights of `bytes_moved`: once in, and once out if they go back."""
    one_way = bytes_moved / where.h2d_copy
    return one_way if run.is_one_way else one_way + bytes_moved / where.d2h_copy
