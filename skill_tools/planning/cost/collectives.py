"""What the ranks of a plain loop send each other: FSDP2's gathers and reductions, or the all-reduce of replicas.

A collective over R ranks moves (R - 1) / R of its bytes to each rank, inside a node over NVLink or over the PCIe link
that copies to the host use too, between nodes over the network. It runs beside the compute of another block; that of
the first block of a pass, or the last one's reduction, has nothing to hide behind. Explained in docs/distributed.md.
"""

from typing import NamedTuple

from skill_tools.dialects.run import Spread, TrainingRun
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine


class Collectives(NamedTuple):
    """Seconds of one micro-batch's collectives, beside its forward and beside its backward."""

    forward_s: float
    backward_s: float


def of_micro_batch(run: TrainingRun, held: int, machine: Machine) -> Collectives | None:
    """Return how long the ranks of `run`, a model of `held` parameters, communicate; None where nothing is known."""
    if run.spread is None:
        return None
    trained = held if run.adapter is None else run.adapter.parameters
    reduced = _seconds(run, run.spread.reduced_bytes * trained, machine)
    if not run.spread.shards:
        return Collectives(0.0, 2 * reduced)
    gathered = _seconds(run, run.spread.gathered_bytes * held, machine)
    return Collectives(gathered, gathered + reduced)


def _seconds(run: TrainingRun, moved_bytes: float, machine: Machine) -> float:
    """Return the seconds of one collective of `moved_bytes`, over the slower of both networks."""
    ranks, here = run.layout.gpus, run.layout.ranks_on_node
    nodes = -(-ranks // here)
    inside = moved_bytes * (ranks - 1) / ranks / machine.peers
    between = moved_bytes * (nodes - 1) / nodes / (here * machine.network)
    return max(inside, between)


def costs(run: TrainingRun, found: Collectives | None, speed: Pace, again_s: float) -> list[Cost]:
    """Return what they cost one micro-batch, whose backward computes for `again_s` what forward did not keep."""
    if found is None or run.spread is None:
        return []
    blocks = run.shape.num_layers
    passes = [("backward", found.backward_s, speed.backward_s + again_s)]
    if found.forward_s:
        passes.insert(0, ("forward", found.forward_s, speed.forward_s))
    return [
        Cost(
            f"{_name(run.spread, during)} in {during}",
            work_s,
            max(work_s / blocks, work_s - compute_s * (blocks - 1) / blocks),
            f"bytes to {run.layout.gpus} ranks / their rate - {during}, at least one block's",
        )
        for during, work_s, compute_s in passes
    ]


def _name(spread: Spread, during: str) -> str:
    if not spread.shards:
        return "all-reduce"
    return "gathers" if during == "forward" else "gathers and reductions"


def left_for_copies(speed: Pace, found: Collectives | None, machine: Machine) -> Pace:
    """Return the pace that copies to the host hide behind: without the time in which collectives use their link."""
    if found is None or not machine.peers_on_link:
        return speed
    return speed._replace(
        forward_s=max(speed.forward_s - found.forward_s, 0.0),
        backward_s=max(speed.backward_s - found.backward_s, 0.0),
    )
