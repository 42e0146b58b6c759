# SPDX-License-Identifier: Apache-2.0
"""The cost of shards that live on the host in a step, by `reference_impl.ShardStreamer`'s timeline.

Forward brings each shard with its gradient and states, updates it and sends weight and states home. Backward brings
shards again and sends their gradients out. Both directions of the link are in use at once, and the ranks of a node
share its memory. Of several backwards a step all but the last add to gradients that are on the host, and only one
forward updates. Explained in docs/distributed.md, "Everything off".

Apart because no other mode has this timeline.
"""

from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.copies import without_one_layer_s
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.model.streamed_states import element_bytes


def costs(
    run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, link_free: Pace, again_s: float
) -> list[Cost]:
    """Return the cost of moving the shards in a step of `run`, beside passes that leave the link to it for `link_free`.

    `again_s` are the seconds for which backward computes again.
    """
    shard, times = memory.parameters.shard, run.micro_batches
    weight, gradient = run.precision.weight_bytes, run.precision.gradient_bytes
    states = element_bytes(run, mode.streamed_states)
    forward_s = without_one_layer_s(run, link_free.forward_s)
    backward_s = without_one_layer_s(run, link_free.backward_s + again_s)

    update = _seconds(weight + gradient + states, weight + states, shard, machine)
    again = _seconds(weight, 0.0, shard, machine)
    out = _seconds(weight, gradient, shard, machine)
    adding = _seconds(weight + gradient, gradient, shard, machine)
    in_forward = [(update, forward_s + link_free.gpu_update_s), *[(again, forward_s)] * (times - 1)]
    in_backward = [(out, backward_s), *[(adding, backward_s)] * (times - 1)]
    return [
        _cost("shards and their update in forward", in_forward, weight + gradient + states),
        _cost("shards and gradients in backward", in_backward, weight),
    ]


def _seconds(inwards: float, outwards: float, elements: float, machine: Machine) -> float:
    """Return the seconds of moving so many bytes of each element, by the link or by the host's memory."""
    link = max(inwards, outwards) / machine.update_link
    return elements * max(link, (inwards + outwards) / machine.update_dram)


def _cost(name: str, passes: list[tuple[float, float]], inwards: float) -> Cost:
    work = sum(work_s for work_s, _ in passes)
    exposed = sum(max(0.0, work_s - behind_s) for work_s, behind_s in passes)
    return Cost(name, work, exposed, f"{inwards:g} B a parameter of the shard in / link both ways - the pass")
