# SPDX-License-Identifier: Apache-2.0
"""Bytes in pageable host memory because they may not be pinned: the offloaders of `reference_impl` alone do that.

Their copies of it pass through a small pinned ring (`reference_impl.limit_pinned_memory`), at the pace of host memory.
Peers pin whatever they copy, so beyond the limit they fail. Explained in docs/fitting.md, "Pinned memory".
"""

from offload_arithmetic.sizes import LEAST_PINNED_LIMIT_BYTES
from skill_tools.dialects.run import ActivationEngine, Mode, OptimizerEngine, WeightEngine
from skill_tools.planning.cost.machine import Machine, model_constants
from skill_tools.planning.model.memory import Memory

_OWN_ACTIVATIONS = {
    ActivationEngine.NONE,
    ActivationEngine.OWN_LAYERS,
    ActivationEngine.OWN_INPUTS,
    ActivationEngine.OWN_BUDGET,
}


def is_own(mode: Mode) -> bool:
    """Return whether all that `mode` moves is moved by `reference_impl`."""
    return (
        not (mode.offload_parameters or mode.state_offload)
        and mode.activation_engine in _OWN_ACTIVATIONS
        and (not mode.optimizer_fraction or mode.optimizer_engine is OptimizerEngine.REFERENCE)
        and (not mode.weight_layers or mode.weight_engine is WeightEngine.REFERENCE)
    )


def within(found: Memory, mode: Mode, pinned_bytes_per_node: int | None) -> Memory:
    """Return `found` where so much of a node may be pinned: bytes beyond are pageable, if our offloaders move them."""
    if pinned_bytes_per_node is None or not is_own(mode):
        return found
    most_bytes = pinned_bytes_per_node // found.ranks_on_node
    if most_bytes < LEAST_PINNED_LIMIT_BYTES or found.pinned_bytes <= most_bytes:
        return found
    return found._replace(pinned_bytes=most_bytes, pageable_bytes=found.pinned_bytes - most_bytes)


def slowed(machine: Machine, found: Memory) -> Machine:
    """Return `machine` with the rates of copies that partly pass through the ring, a share of the bytes like any other.

    Each byte is written and read on the way, beside the copy itself, and both directions do that at once.
    """
    if not found.pageable_bytes:
        return machine
    share = found.pageable_bytes / (found.pageable_bytes + found.pinned_bytes)
    staged = machine.staged_copy or machine.dram / model_constants()["staged_dram_bytes"]

    def mean(rate: float) -> float:
        return 1 / ((1 - share) / rate + share / min(rate, staged))

    return machine._replace(
        h2d_copy=mean(machine.h2d_copy),
        d2h_copy=mean(machine.d2h_copy),
        duplex_copy=mean(machine.duplex_copy),
        update_link=mean(machine.update_link),
    )
