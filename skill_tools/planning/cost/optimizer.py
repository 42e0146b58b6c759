# SPDX-License-Identifier: Apache-2.0
"""The cost of updating offloaded parameters, by engine: seconds of work, and seconds that compute does not hide.

An engine's measured rates win over rates computed from the machine's own. The latter are calibrated only when the
machine was measured; no constant here was fitted to a step time.

The reference implementation's optimizer updates its offloaded share on the CPU, which moves a gradient and a weight, or
on the GPU while the states stream through it. The link, the host's memory and the cores work at once; the slowest is
the update's time. It hides behind the next forward, where each layer waits for its own weights only. Without clipping
the CPU starts in backward already. Explained in docs/optimizer-offloading.md.
"""

from typing import NamedTuple

from offload_arithmetic.sizes import BUCKET_ELEMENTS, LEAST_SLOTS, STATE_CHUNK_BYTES
from offload_arithmetic.states import FORMS, StateBytes, adam_bytes, streamed_muon_bytes
from offload_arithmetic.update_time import MachineRates, resources_of, slowest_s, turning_points
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.run import Mode, OptimizerEngine, StreamedStates
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.machine import Machine, model_constants


class Update(NamedTuple):
    """The cost of an offloaded update, and whether its rate was measured."""

    cost: Cost
    calibrated: bool


class Compute(NamedTuple):
    """The seconds behind which the update may hide: one micro-batch's passes, and the GPU's update of everything."""

    forward_s: float
    backward_s: float
    gpu_update_s: float


def offloaded_update(
    mode: Mode,
    shard: int,
    machine: Machine,
    beside: Compute,
    *,
    weight_bytes: float = 2,
    matrices: Matrices | None = None,
) -> Update:
    """Return the cost of the offloaded share of `shard` parameters in a step, `beside` the work that may hide it.

    Muon updates `matrices` of them, on the GPU alone.
    """
    moved = mode.optimizer_fraction * shard
    match mode.optimizer_engine:
        case OptimizerEngine.REFERENCE:
            each = _state_bytes(mode.streamed_states, weight_bytes, matrices)
            beside_s = 0.0
            if matrices is not None:
                part = shard / matrices.trained
                beside_s = packing_s(mode.streamed_fraction, matrices, machine) * part
            return Update(_reference(mode, shard, machine, beside, each, beside_s), machine.measured)
        case OptimizerEngine.TORCHAO | OptimizerEngine.TORCHAO_GRADIENTS:
            seconds = moved / (2 * machine.cpu_adam_per_tensor) + 2 * moved / machine.h2d_copy
            formula = "bf16 AdamW tensor by tensor at half the bytes, then 2 B up; gradients are offloaded in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), machine.measured)
        case OptimizerEngine.CPU_ADAM:
            seconds = moved / machine.cpu_adam + 2 * moved / machine.h2d_copy
            formula = "CPU AdamW, then 2 B up; gradients are offloaded in backward"
            return Update(Cost("optimizer on the CPU", seconds, seconds, formula), calibrated=False)
    return _hybrid_device(mode, moved, machine)


def _hybrid_device(mode: Mode, moved: float, machine: Machine) -> Update:
    """Return the cost of Megatron's HybridDeviceOptimizer: fp32 both ways, nothing hidden behind compute.

    With overlap every tensor is an optimizer of its own: its calls are slower and hide the copies. Without, one call
    updates everything and the copies are serial.
    """
    known = machine.hybrid_overlap if mode.overlap else machine.hybrid
    if known is not None:
        each, how, calibrated = (
            1 / known,
            f"at {known / 1e9:.3f} Gparam/s a rank, measured on such a host",
            True,
        )
    elif mode.overlap:
        each = max(1 / machine.cpu_adam_per_tensor, 4 / machine.d2h_copy, 4 / machine.h2d_copy)
        how, calibrated = "at the rate of CPU AdamW a tensor", machine.measured
    else:
        each = 1 / machine.cpu_adam + 4 / machine.d2h_copy + 4 / machine.h2d_copy
        how, calibrated = "CPU AdamW, and 4 B a parameter down and up", machine.measured
    seconds = moved * each
    return Update(
        Cost("optimizer on the CPU", seconds, seconds, f"{moved / 1e9:.3f}e9 parameters {how}"), calibrated
    )


def update_seconds(
    cpu: float,
    streamed: float,
    machine: Machine,
    states: StreamedStates = StreamedStates.EXACT,
    *,
    weight_bytes: float = 2,
) -> float:
    """Return the seconds in which `cpu` and `streamed` elements can be updated side by side, nothing hidden."""
    return _seconds(cpu, streamed, machine, _state_bytes(states, weight_bytes, None))


def _seconds(cpu: float, streamed: float, machine: Machine, each: StateBytes) -> float:
    return slowest_s(resources_of(cpu + streamed, 1, each, rates(machine)), cpu)


def _state_bytes(states: StreamedStates, weight_bytes: float, matrices: Matrices | None) -> StateBytes:
    """Return the bytes of an element of AdamW's, or the mean of Muon's and AdamW's, with all states streamed."""
    each = adam_bytes(weight_bytes, FORMS[states])
    if matrices is None:
        return each
    return each._replace(streamed=streamed_muon_bytes(weight_bytes, FORMS[states], matrices.share))


def best_streamed_share(
    machine: Machine, states: StreamedStates = StreamedStates.EXACT, *, weight_bytes: float = 2
) -> float:
    """Return the streamed share of the offloaded states by which link and host memory finish together."""
    resources = resources_of(1.0, 1, adam_bytes(weight_bytes, FORMS[states]), rates(machine))
    return 1 - min(turning_points(resources, 0.0, 1.0), key=lambda cpu: slowest_s(resources, cpu))


def rates(machine: Machine) -> MachineRates:
    """Return the rates of `machine` that an update meets."""
    return MachineRates(machine.update_link, machine.update_dram, machine.update_cpu)


def packing_s(streamed: float, matrices: Matrices, machine: Machine) -> float:
    """Return the seconds of the GPU's kernels that the streamed share of matrices has beside Muon's own."""
    constants = model_constants()
    moved = constants["muon_streamed_bytes"] * streamed * matrices.share * matrices.trained
    return moved / (machine.hbm * constants["elementwise_share"])


def _reference(
    mode: Mode, shard: int, machine: Machine, beside: Compute, each: StateBytes, packing_s: float
) -> Cost:
    """Return the cost of `reference_impl`'s update of the offloaded share of `shard` elements.

    `packing_s` are kernels that are there only because states stream; other formulas have them in one kernel.
    The CPU also takes work off the GPU. This is left out: it is worth a few percent of a step, and nobody should
    offload for it.
    """
    streamed = mode.streamed_fraction * shard
    cpu = mode.optimizer_fraction * shard - streamed
    done = 0.0
    if mode.updates_in_backward and cpu:
        done = min(cpu, beside.backward_s * cpu / _seconds(cpu, 0.0, machine, each))
    waiting = min(streamed, LEAST_SLOTS * int(STATE_CHUNK_BYTES // each.streamed))
    rest = _seconds(cpu - done, streamed - waiting, machine, each)
    on_gpu = beside.gpu_update_s * (1 - cpu / shard)
    on_gpu += packing_s
    exposed = packing_s + max(_latency(cpu, machine, each), rest - beside.forward_s - on_gpu)
    hides = "backward and the next forward" if mode.updates_in_backward else "the next forward"
    formula = f"{cpu / 1e9:.3f}e9 parameters on the CPU, {streamed / 1e9:.3f}e9 streamed, less {hides}"
    work = _seconds(cpu, streamed, machine, each)
    return Cost("offloaded optimizer", work, exposed, formula)


def _latency(cpu: float, machine: Machine, each: StateBytes) -> float:
    """Return the seconds of the bucket that the next forward needs first: copied down, updated, copied up."""
    elements = min(cpu, BUCKET_ELEMENTS)
    link = each.staging * elements * (1 / machine.d2h_copy + 1 / machine.h2d_copy)
    return link + _seconds(elements, 0.0, machine, each)
