# SPDX-License-Identifier: Apache-2.0
"""The cost of copying activations and weights in a micro-batch, by engine: seconds of work, and seconds not hidden.

Copies hide behind the compute that runs beside them: D2H behind forward, H2D behind backward. Engines that
wait for every tensor (save_on_cpu), fetch on demand (TRL), or copy on the compute stream (Axolotl's layer
offloading) hide less. Explained in docs/activation-offloading.md and docs/layer-streaming.md.
"""

from collections.abc import Sequence

from skill_tools.dialects.run import ActivationEngine, Mode, TrainingRun, WeightEngine
from skill_tools.planning.accounts import Cost, Kind
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import frozen_layers
from skill_tools.planning.model.memory import Memory

DOWN, BACK = "activations to the host", "activations back"


def activations(run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return the costs of one micro-batch's activations on their way to the host and back."""
    if not memory.moved_bytes:
        return []
    match mode.activation_engine:
        case ActivationEngine.SAVE_ON_CPU:
            return _blocking(run, mode, memory, machine)
        case ActivationEngine.ON_DEMAND:
            return _on_demand(run, memory, machine, speed)
        case ActivationEngine.INPUTS:
            back = memory.moved_bytes / machine.h2d_copy
            down = memory.moved_bytes / machine.d2h_copy
            return [
                Cost(
                    "layer inputs to the host",
                    down,
                    max(0.0, down - speed.forward_s),
                    "bytes / D2H - forward",
                ),
                Cost("layer inputs back", back, back, "bytes / H2D, fetched when a layer needs them"),
            ]
    return _windowed(run, memory, machine, speed)


def _windowed(run: TrainingRun, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return the costs of bulk copies beside compute; all layers but the last hide them."""
    down, up = memory.moved_bytes / machine.d2h_copy, memory.moved_bytes / machine.h2d_copy
    forward, backward = without_one_layer_s(run, speed.forward_s), without_one_layer_s(run, speed.backward_s)
    return [
        Cost(DOWN, down, max(0.0, down - forward), "bytes / D2H - forward"),
        Cost(BACK, up, max(0.0, up - backward), "bytes / H2D - backward"),
    ]


def without_one_layer_s(run: TrainingRun, pass_s: float) -> float:
    """Return the part of a pass that hides copies awaited layer by layer: all layers but one."""
    layers = run.shape.num_layers / run.layout.pipeline
    return pass_s * max(layers - 1, 0) / layers


def _blocking(run: TrainingRun, mode: Mode, memory: Memory, machine: Machine) -> list[Cost]:
    """Return the costs of save_on_cpu, which copies every saved tensor, also views of the weights, and waits."""
    share = mode.layers / run.shape.num_layers if mode.layers else 1.0
    moved = memory.copied_bytes + 2 * share * memory.parameters.total
    if not mode.layers:
        moved += 4 * run.tokens * run.shape.vocab
    down, up = moved / machine.d2h_copy, moved / machine.h2d_copy
    return [
        Cost("saved tensors to the host", down, down, "bytes / D2H, compute waits"),
        Cost("saved tensors back", up, up, "bytes / H2D, compute waits"),
    ]


def _on_demand(run: TrainingRun, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return the costs of TRL, which hides copies behind forward and fetches each tensor when backward asks for it."""
    moved = memory.moved_bytes + 4 * run.tokens * run.shape.vocab
    down, up = moved / machine.d2h_copy, moved / machine.h2d_copy
    return [
        Cost("saved tensors to the host", down, max(0.0, down - speed.forward_s), "bytes / D2H - forward"),
        Cost("saved tensors back", up, up, "bytes / H2D, fetched on demand"),
    ]


def hidden_s(costs: Sequence[Cost], *names: str) -> float:
    """Return the seconds of the named copies that compute hides; one link serves all copies."""
    return sum(cost.work_s - cost.exposed_s for cost in costs if cost.name in names)


def weights(
    run: TrainingRun,
    mode: Mode,
    memory: Memory,
    machine: Machine,
    speed: Pace,
    copies: Sequence[Cost],
    again_s: float,
) -> list[Cost]:
    """Return the costs of streaming frozen layers through one micro-batch, beside the activations' `copies`.

    A layer that is computed again in backward, `again_s` for all, needs its weights there once.
    """
    moved = sum(line.bytes for line in memory.host if line.kind is Kind.FROZEN_WEIGHTS)
    if not moved or not mode.weight_layers:
        return []
    if mode.weight_engine is WeightEngine.SWAPPED:
        back = 2 * moved / machine.duplex_copy
        return [
            Cost(
                "frozen layers in, and out again",
                2 * back,
                back,
                "2 x bytes / link, out on the compute stream",
            )
        ]
    # A pass begins with the layers that the window holds at the end of the pass before.
    window = frozen_layers.window_bytes(run, mode, moved)
    each = max(moved - window, 0) / machine.h2d_copy
    again = max(_read_in_backward(run) * moved - window, 0) / machine.h2d_copy
    forward = without_one_layer_s(run, speed.forward_s)
    backward = without_one_layer_s(run, speed.backward_s + again_s) - hidden_s(copies, BACK)
    return [
        Cost("frozen layers for forward", each, max(0.0, each - forward), "bytes / H2D - forward"),
        Cost(
            "frozen layers for backward",
            again,
            max(0.0, again - backward),
            "bytes / H2D - backward, recomputation included, without activation copies",
        ),
    ]


def _read_in_backward(run: TrainingRun) -> float:
    """Return the share of the frozen layers' bytes in layers with a backward.

    Of several lists, the layers without a backward are not known.
    """
    if run.traced is None or len(run.traced.frozen_layers) != run.shape.num_layers:
        return 1.0
    layers = run.frozen_layers
    return sum(layers[run.traced.layers_without_backward :]) / sum(layers)


def sharded_parameters(mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> list[Cost]:
    """Return the costs of FSDP's or ZeRO's parameter offload: shards up twice, gradients down, nothing prefetched."""
    if not mode.offload_parameters:
        return []
    moved = sum(line.bytes for line in memory.host if line.kind in (Kind.WEIGHTS, Kind.FROZEN_WEIGHTS))
    up = 2 * moved / machine.h2d_copy
    exposed = max(0.0, up - speed.forward_s - speed.backward_s)
    return [Cost("sharded parameters from the host", up, exposed, "2 x shard / H2D - forward and backward")]
