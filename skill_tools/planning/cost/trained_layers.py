"""What trained layers that stream cost a step, by `reference_impl.TrainableLayerStreamer`'s timeline.

A step with exact clipping lasts `max(T_b, 2 N / B) + max(T_f, (4 + S) N / B)`: backward hides the weights that come in
and the gradients that leave, the next forward the weights and the states that pass. Both directions are in use at once,
and an update takes no less than reading and writing its bytes in host memory does.
Updated in backward, where nothing is clipped, it lasts `max(T_f, 2 N / B) + max(T_b, (2 + S) N / B)`, and the first
block and what stands before it have nothing to hide behind. Weights that stay on the GPU travel in neither.
Where gradients add up over several backwards, weights travel for each, and a gradient that has left comes back to be
added to. The states of what stands outside the blocks come first and have nothing to hide behind. Explained in
docs/larger-than-gpu.md.
"""

from skill_tools.dialects.run import Mode, Run
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import trained_layers
from skill_tools.planning.model.memory import Memory


def costs(run: Run, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return what one step of `run` takes beyond its compute."""
    size = trained_layers.sizes(run, memory.parameters.total)
    held, times = memory.parameters.total, run.micro_batches
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    states_bytes = trained_layers.streamed_bytes(run, mode.streamed_states)
    gradients = gradient_bytes * held
    weights = weight_bytes * size.in_blocks * trained_layers.streamed_share(run, mode)
    again = speed.layers_forward_s
    in_backward = speed.backward_s + again
    fixed = [
        Cost("recompute full", again * times, again * times, "the blocks' forward once more"),
        Cost("optimizer on the GPU", speed.gpu_update_s, speed.gpu_update_s, "28 B a parameter / HBM"),
    ]

    def update_s(inwards: float, outwards: float) -> float:
        return max(max(inwards, outwards) / machine.update_link, (inwards + outwards) / machine.update_dram)

    forward = _link_s(weights, memory.moved_bytes, machine)
    states = states_bytes * held
    if mode.updates_in_backward:
        update = update_s(weights + states + memory.moved_bytes, weights + states)
        last = states_bytes * (size.block + size.table) / machine.update_link
        return [
            *fixed,
            Cost(
                "trained layers for forward",
                forward,
                max(0.0, forward - speed.forward_s),
                "2 B a parameter in / link - forward",
            ),
            Cost(
                "trained layers and states in backward",
                update,
                max(last, update - in_backward - speed.gpu_update_s),
                f"{weight_bytes + states_bytes:g} B a parameter in / link both ways - backward and update",
            ),
        ]
    backward = _link_s(weights + memory.moved_bytes, gradients, machine)
    adding = _link_s(weights + memory.moved_bytes + gradients, gradients, machine)
    update = update_s(weights + gradients + states, weights + states + memory.moved_bytes)
    outside = (gradient_bytes + states_bytes) * size.outside / machine.update_link

    hidden = [(forward, speed.forward_s)] * (times - 1)
    hidden += [(backward, in_backward)] + [(adding, in_backward)] * (times - 1)
    return [
        *fixed,
        Cost(
            "trained layers for forward and backward",
            sum(work for work, _ in hidden),
            sum(max(0.0, work - behind) for work, behind in hidden),
            "2 B a parameter in, and out in backward / link both ways - the pass",
        ),
        Cost(
            "states with the next forward",
            update,
            max(outside, update - speed.forward_s - speed.gpu_update_s),
            f"{weight_bytes + gradient_bytes + states_bytes:g} B a parameter in / link both ways - forward and update",
        ),
    ]


def _link_s(inwards: float, outwards: float, machine: Machine) -> float:
    """Return the seconds of copies in both directions at once."""
    both = min(inwards, outwards)
    one_way = machine.h2d_copy if inwards > outwards else machine.d2h_copy
    return both / machine.duplex_copy + (max(inwards, outwards) - both) / one_way
