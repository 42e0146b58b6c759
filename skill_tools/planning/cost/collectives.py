# SPDX-License-Identifier: Apache-2.0
"""Traffic between data-parallel ranks: gathers and reductions of shards, or the all-reduce of replicas.

A collective over R ranks moves (R - 1) / R of its bytes to each rank, inside a node over NVLink or over the PCIe link
that copies to the host use too, between nodes over the network. It runs beside the compute of another block; that of
the first block of a pass, or the last one's reduction, has nothing to hide behind. The copies of tensor, expert and
pipeline parallelism are part of the share of the GEMM rate that Megatron's steps reach. A measured step has its
collectives in it. Explained in docs/distributed.md.
"""

from typing import NamedTuple

from offload_arithmetic.states import BF16_BYTES
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import Exchange, TrainingRun
from skill_tools.planning.accounts import Cost
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine


class Collectives(NamedTuple):
    """Seconds of one micro-batch's collectives, beside its forward and beside its backward."""

    forward_s: float
    backward_s: float


def of_micro_batch(run: TrainingRun, held: LocalParameters, machine: Machine) -> Collectives | None:
    """Return the communication time of ranks with `held` for a micro-batch; None without communication."""
    sent = run.exchange
    if sent is None:
        return None
    reduced_s = _reduction_s(run, sent, held, machine) if sent.each_batch else 0.0
    found = Collectives(
        _gather_s(run, sent, held, sent.gathered_forward, machine),
        _gather_s(run, sent, held, sent.gathered_backward, machine) + reduced_s,
    )
    return found if any(found) else None


def _gather_s(
    run: TrainingRun, sent: Exchange, held: LocalParameters, each_bytes: float, machine: Machine
) -> float:
    return each_bytes and _seconds(run, held, each_bytes, machine, group=sent.group)


def _reduction_s(run: TrainingRun, sent: Exchange, held: LocalParameters, machine: Machine) -> float:
    """Return the seconds of reducing the gradients, of adapters those alone."""
    trained = held if run.adapter is None else LocalParameters(run.adapter.parameters, 0, 0, 0)
    once = _seconds(run, trained, sent.reduced, machine, group=sent.group)
    if sent.all_reduces:
        return 2 * once
    replicas = run.layout.dense_shards // sent.group if sent.group else 1
    if replicas == 1:
        return once
    # Each rank's shard of the gradients goes to those of the other groups, and back.
    shard = sent.reduced * trained.total / sent.group
    return once + 2 * shard * (replicas - 1) / replicas / machine.network


def _seconds(
    run: TrainingRun, held: LocalParameters, each_bytes: float, machine: Machine, *, group: int = 0
) -> float:
    """Return the seconds of one collective of `each_bytes` of each element, dense ones and experts' in their groups."""
    layout = run.layout
    expert_ranks = layout.expert * layout.expert_tensor
    return _group_s(
        held.dense * each_bytes, group or layout.dense_shards, layout.tensor, run, machine
    ) + _group_s(held.expert * each_bytes, group or layout.expert_shards, expert_ranks, run, machine)


def _group_s(moved_bytes: float, ranks: int, apart: int, run: TrainingRun, machine: Machine) -> float:
    """Return the seconds of `moved_bytes` over the slower network, among `ranks` at a distance of `apart`."""
    here = max(1, min(ranks, run.layout.ranks_on_node // apart))
    nodes = -(-ranks // here)
    inside = moved_bytes * (ranks - 1) / ranks / machine.peers
    between = moved_bytes * (nodes - 1) / nodes / (here * machine.network)
    return max(inside, between)


def costs(run: TrainingRun, found: Collectives | None, speed: Pace, again_s: float) -> list[Cost]:
    """Return their cost for one micro-batch, whose backward computes discarded activations again for `again_s`."""
    sent = run.exchange
    if found is None or sent is None or speed.has_collectives:
        return []
    passes = [
        ("gathers in forward", found.forward_s, speed.forward_s),
        (_in_backward(sent), found.backward_s, speed.backward_s + again_s),
    ]
    return [_beside(run, name, work_s, compute_s) for name, work_s, compute_s in passes if work_s]


def once_a_step(
    run: TrainingRun, held: LocalParameters, machine: Machine, speed: Pace, again_s: float
) -> list[Cost]:
    """Return the traffic of one step: gradients beside the last backward, and the weights that it updated."""
    sent = run.exchange
    if sent is None or speed.has_collectives:
        return []
    found = []
    if sent.reduced and not sent.each_batch:
        work_s = _reduction_s(run, sent, held, machine)
        name = "all-reduce in backward" if sent.all_reduces else "reductions in backward"
        found.append(_beside(run, name, work_s, 0 if sent.reduction_waits else speed.backward_s + again_s))
    if run.matrices is not None and run.is_fully_sharded:
        # The directions of a rank's shards in bf16, to the matrices' owners and back; stacks of experts are whole.
        each_bytes = 2 * BF16_BYTES * run.matrices.share / run.weight_shards
        work_s = _seconds(run, held._replace(expert=0), each_bytes, machine)
        found.append(_beside(run, "matrices to their owners and back", work_s, speed.forward_s))
    if sent.gathered_after_update and run.adapter is None:
        work_s = _seconds(run, held, sent.gathered_after_update, machine)
        found.append(
            _beside(run, "updated weights to all ranks", work_s, 0 if sent.gather_waits else speed.forward_s)
        )
    return [cost for cost in found if cost.work_s]


def _in_backward(sent: Exchange) -> str:
    if sent.all_reduces:
        return "all-reduce in backward"
    return "gathers and reductions in backward" if sent.gathered_backward else "reductions in backward"


def _beside(run: TrainingRun, name: str, work_s: float, compute_s: float) -> Cost:
    """Return the cost, if any, beside `compute_s` of other blocks."""
    blocks = run.shape.num_layers
    exposed_s = max(work_s / blocks, work_s - compute_s * (blocks - 1) / blocks) if compute_s else work_s
    hidden = " - compute beside it, at least one block's" if compute_s else ", compute waits"
    return Cost(name, work_s, exposed_s, f"bytes to {run.layout.dense_shards} ranks / their rate{hidden}")


def left_for_copies(speed: Pace, found: Collectives | None, machine: Machine) -> Pace:
    """Return the pace that hides copies to the host: without the collectives' time on their link."""
    if found is None or not machine.peers_on_link:
        return speed
    return speed._replace(
        forward_s=max(speed.forward_s - found.forward_s, 0.0),
        backward_s=max(speed.backward_s - found.backward_s, 0.0),
    )
