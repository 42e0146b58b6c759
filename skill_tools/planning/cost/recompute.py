# SPDX-License-Identifier: Apache-2.0
"""The cost of computing activations again: a framework's recompute, the share that a budget chooses, and its hooks.

`reference_impl`'s budget recomputes some saved bytes and offloads others. Copies are free while the link keeps up with
the compute beside them; computing again costs as much as the operation did. So the cheapest results are recomputed, and
the rest is copied. The engine decides tensor by tensor from a measured step; this module makes the same trade for kinds
of tensors, from rates. The engine handles every saved tensor in Python: that lengthens a step bound by its launches.
Explained in docs/activation-offloading.md.
"""

from collections.abc import Iterator
from functools import lru_cache

from skill_tools.dialects.run import ActivationEngine, Mode, TrainingRun
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace, launch_seconds, micro_batch_flops
from skill_tools.planning.cost.machine import Machine, model_constants
from skill_tools.planning.model import activations, tiles
from skill_tools.planning.model.activations import Part
from skill_tools.planning.model.memory import Memory
from skill_tools.units import seconds

_STEPS = 16
# A layer's forward, the same again, and its backward of two.
_FORWARDS = 4
# An elementwise operation reads its inputs and writes its result: about three passes over its bytes.
_PASSES = 3


def layers_again_s(run: TrainingRun, mode: Mode, speed: Pace) -> float:
    """Return the seconds of computing all layers of one micro-batch again, less attention that is kept."""
    return speed.layers_forward_s - speed.core_forward_s * mode.attention_layers / run.shape.num_layers


def tiles_cost(run: TrainingRun, mode: Mode, speed: Pace) -> Iterator[Cost]:
    """Yield costs of tiles of the sequence for a micro-batch: norms once more, sums in fp32, smaller matrix products.

    Groups of heads run more and smaller kernels.
    """
    if tiles.are_used(run, mode):
        share = model_constants()["tiles_extra"]
        extra = share * _FORWARDS * (speed.layers_forward_s - speed.core_forward_s)
        yield Cost(
            "tiles of the sequence",
            extra,
            extra,
            f"{share:g} x the passes of layers, less attention; measured",
        )
    if tiles.are_used(run, mode) and mode.head_groups:
        group_s = model_constants()["head_group_s"]
        extra = mode.head_groups * run.shape.num_layers * group_s
        yield Cost("groups of heads", extra, extra, f"{seconds(group_s)} a group and layer; measured")


def recompute_costs(
    run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, speed: Pace
) -> Iterator[Cost]:
    """Yield the costs of the operations that one micro-batch computes again under `mode`."""
    if cost := _of_framework(run, mode, memory, machine, speed):
        yield cost
    yield from tiles_cost(run, mode, speed)
    again = 0.0
    if mode.recomputed:
        again = recompute_seconds(run, machine, speed, mode.recomputed) or 0.0
        formula = f"{mode.recomputed:.0%} of the saved bytes, the cheapest first"
        yield Cost("recompute under a budget", again, again, formula)
    if launches := _launches_of_hooks(run, mode):
        assert run.traced is not None
        plain = launch_seconds(run, run.traced.plain, machine)
        covered = speed.forward_s + speed.backward_s + again
        exposed = max(0.0, (1 + launches) * plain - covered)
        formula = f"{1 + launches:.1f} x launches without hooks - forward and backward"
        yield Cost("hooks of saved tensors", launches * plain, exposed, formula)
    if run.traced is not None and mode.activation_engine is ActivationEngine.OWN_BUDGET:
        share = machine.budget_extra or model_constants()["budget_extra"]
        extra = share * (speed.forward_s + speed.backward_s)
        yield Cost(
            "activation budget", extra, extra, f"{share:g} x forward and backward, measured of real models"
        )


def _launches_of_hooks(run: TrainingRun, mode: Mode) -> float:
    """Return the host's time in `reference_impl`'s hooks, as a share of launching a step; without a trace 0."""
    if run.traced is None:
        return 0.0
    constants = model_constants()
    seen, moved = constants["hook_launches"], constants["offload_launches"]
    match mode.activation_engine:
        case ActivationEngine.OWN_LAYERS:
            return (seen + moved) * mode.layers / run.shape.num_layers
        case ActivationEngine.OWN_BUDGET:
            tape = constants["tape_launches"] if mode.recomputed else 0.0
            return seen + moved * (mode.removed - mode.recomputed) + tape
    return 0.0


def _of_framework(run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, speed: Pace) -> Cost | None:
    recompute = mode.recompute or run.recompute
    if recompute.granularity == "full":
        layers = run.shape.num_layers / run.layout.pipeline
        share = 1.0 if recompute.method == "uniform" else min(recompute.layers / layers, 1.0)
        again = share * layers_again_s(run, mode, speed)
    elif recompute.granularity == "selective":
        again = (
            (speed.core_forward_s if "core_attn" in recompute.modules else 0.0)
            + (speed.mlp_forward_s if {"mlp", "moe"} & set(recompute.modules) else 0.0)
            + 2 * activations.dropped_bytes(run, recompute, memory.stage) / machine.hbm
        )
    else:
        return None
    return Cost(f"recompute {recompute.granularity}", again, again, "the recomputed part's forward once more")


@lru_cache(maxsize=64)
def recomputed_share(run: TrainingRun, machine: Machine, speed: Pace, removed: float) -> float:
    """Return which share of all saved bytes to compute again when the share `removed` must not stay on the GPU."""
    tried = [removed * step / _STEPS for step in range(_STEPS + 1)]
    possible = [share for share in tried if recompute_seconds(run, machine, speed, share) is not None]
    return min(possible, key=lambda share: _exposed(run, machine, speed, removed, share))


def _exposed(run: TrainingRun, machine: Machine, speed: Pace, removed: float, recomputed: float) -> float:
    """Seconds that one micro-batch takes longer."""
    again = recompute_seconds(run, machine, speed, recomputed) or 0.0
    moved = (removed - recomputed) * _saved(run)
    down = max(0.0, moved / machine.d2h_copy - speed.forward_s)
    return again + down + max(0.0, moved / machine.h2d_copy - speed.backward_s - again)


def recompute_seconds(run: TrainingRun, machine: Machine, speed: Pace, share: float) -> float | None:
    """Return the seconds of computing `share` of the saved bytes again, cheapest first; None where it cannot be."""
    rest, seconds = share * _saved(run), 0.0
    for cost, size in _kinds(run, machine, speed):
        taken = min(rest, size)
        seconds += taken * cost
        rest -= taken
    return seconds if rest < 1 else None


@lru_cache(maxsize=64)
def _kinds(run: TrainingRun, machine: Machine, speed: Pace) -> tuple[tuple[float, float], ...]:
    """Return (seconds a byte, bytes) of each result that one micro-batch can compute again, cheapest first."""
    per_flop = speed.layers_forward_s / micro_batch_flops(run).layers_forward
    found: dict[float, float] = {}
    for part in _parts(run):
        cost = _seconds_a_byte(part, run, machine, per_flop)
        if cost is not None:
            found[cost] = found.get(cost, 0.0) + part.token_bytes * run.tokens
    return tuple(sorted(found.items()))


def _seconds_a_byte(part: Part, run: TrainingRun, machine: Machine, per_flop: float) -> float | None:
    """Two bytes of a linear's result cost two FLOPs for each input; of attention's, two for each earlier token."""
    if part.name.endswith(("norm output", "activation output")):
        return _PASSES / machine.hbm
    if part.name.endswith("linear output") or part.name in {"query, key, value", "MLP norm input"}:
        return run.shape.hidden * per_flop
    if part.name == "attention output":
        return run.seq_length * per_flop
    return None


@lru_cache(maxsize=64)
def _saved(run: TrainingRun) -> float:
    """Bytes that all layers save in one micro-batch."""
    return sum(part.token_bytes for part in _parts(run)) * run.tokens


def _parts(run: TrainingRun) -> list[Part]:
    """List the tensors that all layers save; layers of one kind save the same."""
    kinds = {
        moe: activations.layer_parts(run, moe=moe) for moe in (False, True) if not moe or run.shape.experts
    }
    return [part for index in range(run.shape.num_layers) for part in kinds[run.shape.is_moe(index)]]
