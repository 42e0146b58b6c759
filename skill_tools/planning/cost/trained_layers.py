# SPDX-License-Identifier: Apache-2.0
"""The cost of streamed trained layers in a step, by `reference_impl.TrainableLayerStreamer`'s timeline.

A step with exact clipping lasts `max(T_b, 2 N / B) + max(T_f, (4 + S) N / B)`. Backward hides incoming weights and
outgoing gradients, the next forward hides weights and states. Both directions are in use at once, and an update takes
at least the time to read and write its bytes in host memory. Updated in backward, without clipping, it lasts `max(T_f,
2 N / B) + max(T_b, (2 + S) N / B)`. The first block and the weights before it have nothing to hide behind. Resident
weights travel in neither. With gradients accumulated over several backwards, weights travel for each, and a gradient
comes back from the host for each addition. The states of weights outside the blocks come first and have nothing to hide
behind.

Resident states cross no link. If the CPU updates a parameter, its gradient does not come back, and its new weight is
copied a second time, because its block was on its way before. Explained in docs/larger-than-gpu.md.
"""

from typing import NamedTuple

from offload_arithmetic.sizes import LEAST_GAIN
from offload_arithmetic.states import FORMS, adam_bytes
from offload_arithmetic.update_time import Resource, slowest_s, turning_points
from skill_tools.dialects.run import Mode, StreamedStates, TrainingRun
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.optimizer import packing_s
from skill_tools.planning.cost.recompute import layers_again_s, tiles_cost
from skill_tools.planning.model import trained_layers
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.model.streamed_states import element_bytes, outside_element_bytes


class _Traffic(NamedTuple):
    """Bytes that an update moves: over the link both ways, and in host memory beside these copies."""

    inwards: float
    outwards: float
    on_cpu: float = 0.0

    def seconds(self, machine: Machine, updated_on_cpu: float = 0.0) -> float:
        """Return its time, with so many elements updated on the CPU."""
        return max(self.each_s(machine, updated_on_cpu))

    def each_s(self, machine: Machine, updated_on_cpu: float) -> tuple[float, float, float]:
        """Return the times of link, host memory and cores."""
        return (
            max(self.inwards, self.outwards) / machine.update_link,
            (self.inwards + self.outwards + self.on_cpu) / machine.update_dram,
            updated_on_cpu / machine.update_cpu,
        )


def _of_element(run: TrainingRun, states: StreamedStates) -> tuple[_Traffic, _Traffic]:
    """Return an element's bytes beside its weight's first copy: updated on the CPU, and streamed."""
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    states_bytes = element_bytes(run, states)
    return (
        # Gradient, states and staging, and from there home: beside the copies.
        _Traffic(weight_bytes, 0.0, adam_bytes(weight_bytes, FORMS[states]).cpu_traffic),
        _Traffic(gradient_bytes + states_bytes, weight_bytes + states_bytes),
    )


def best_cpu_share(run: TrainingRun, states: StreamedStates, machine: Machine) -> float:
    """Return the best share of states to update on the CPU if nothing hides them; 0 if it gains little.

    Muon's matrices never go there, and AdamW's part beside them is small.
    """
    if run.matrices is not None:
        return 0.0
    weight_bytes = run.precision.weight_bytes
    on_cpu, streamed = (
        each._replace(inwards=each.inwards + weight_bytes) for each in _of_element(run, states)
    )
    resources = [
        Resource(stream_s, cpu_s - stream_s)
        for cpu_s, stream_s in zip(on_cpu.each_s(machine, 1.0), streamed.each_s(machine, 0.0), strict=True)
    ]
    best = min(turning_points(resources, 0.0, 1.0), key=lambda cpu: slowest_s(resources, cpu))
    is_worth_it = slowest_s(resources, best) <= (1 - LEAST_GAIN) * slowest_s(resources, 0.0)
    return best if is_worth_it else 0.0


def costs(run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return the seconds of one step of `run` beyond its compute."""
    size = trained_layers.sizes(run, memory.parameters.total)
    held, times = memory.parameters.total, run.micro_batches
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    states_bytes = element_bytes(run, mode.streamed_states)
    outside_bytes = outside_element_bytes(run, mode.streamed_states)
    gradients = gradient_bytes * held
    streamed, on_cpu = mode.states_streamed * held, mode.states_on_cpu * held
    weights = weight_bytes * size.in_blocks * trained_layers.streamed_share(run, mode)
    again = layers_again_s(run, mode, speed)
    less = f", but for attention of {mode.attention_layers} layers" if mode.attention_layers else ""
    in_tiles = list(tiles_cost(run, mode, speed))
    in_backward = speed.backward_s + again
    on_gpu = speed.gpu_update_s
    if run.matrices is not None:
        on_gpu += packing_s(mode.states_streamed, run.matrices, machine)
    fixed = [
        Cost("recompute full", again * times, again * times, f"the blocks' forward once more{less}"),
        *(Cost(each.name, each.work_s * times, each.exposed_s * times, each.formula) for each in in_tiles),
        Cost(
            "optimizer on the GPU",
            on_gpu,
            on_gpu,
            "28 B a parameter / HBM" if run.matrices is None else "Muon",
        ),
    ]
    forward = _link_s(weights, memory.moved_bytes, machine)
    states = states_bytes * streamed
    # Those that stay are of the first ones.
    stays = mode.states_resident * held
    if mode.updates_in_backward:
        update = _Traffic(weights + states + memory.moved_bytes, weights + states).seconds(machine)
        last = outside_bytes * max(size.block + size.table - stays, 0) / machine.update_link
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
                max(last, update - in_backward - on_gpu),
                f"{weight_bytes + states_bytes:g} B a parameter in / link both ways - backward and update",
            ),
        ]
    backward = _link_s(weights + memory.moved_bytes, gradients, machine)
    adding = _link_s(weights + memory.moved_bytes + gradients, gradients, machine)
    cpus, streams = _of_element(run, mode.streamed_states)
    back = gradient_bytes * stays
    moved = _Traffic(
        weights + back + streams.inwards * streamed + cpus.inwards * on_cpu,
        # New weights with a home, without those already in it.
        weights * (1 - mode.states_on_cpu) + states + memory.moved_bytes,
        cpus.on_cpu * on_cpu,
    )
    update = moved.seconds(machine, on_cpu)
    outside = gradient_bytes * size.outside + outside_bytes * max(size.outside - stays, 0)
    outside_s = outside / machine.update_link

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
            max(outside_s, update - speed.forward_s - on_gpu),
            f"{weight_bytes + gradient_bytes + states_bytes:g} B a parameter in / link both ways - forward and update",
        ),
    ]


def _link_s(inwards: float, outwards: float, machine: Machine) -> float:
    """Return the seconds of copies in both directions at once."""
    both = min(inwards, outwards)
    one_way = machine.h2d_copy if inwards > outwards else machine.d2h_copy
    return both / machine.duplex_copy + (max(inwards, outwards) - both) / one_way
