# SPDX-License-Identifier: Apache-2.0
"""Bytes of states that stream through the GPU in chunks, by their form: of an element, of a ring of slots, of scratch.

An fp32 weight is its own master, so that only its moments stream. Forms are those of `reference_impl`'s `Streaming`,
explained in docs/optimizer-state-offloading.md.
"""

from offload_arithmetic import sizes
from offload_arithmetic.states import (
    ADAM_MOMENTS,
    BF16_BYTES,
    FORMS,
    FP32_BYTES,
    MUON_MOMENTS,
    scratch_bytes,
    streamed_muon_bytes,
)
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.run import StreamedStates, TrainingRun


def streamed_bytes(states: StreamedStates, *, own_master: bool = False) -> float:
    """Return the bytes of an element's states, which cross the link each way."""
    return FORMS[states].bytes(ADAM_MOMENTS, is_own_master=own_master)


def element_bytes(run: TrainingRun, states: StreamedStates) -> float:
    """Return the same for the weights of `run`, as a mean where Muon updates some."""
    if run.matrices is not None:
        return streamed_muon_bytes(run.precision.weight_bytes, FORMS[states], run.matrices.share)
    return streamed_bytes(states, own_master=has_own_masters(run))


def outside_element_bytes(run: TrainingRun, states: StreamedStates) -> float:
    """Return the same for weights outside the blocks, which AdamW updates."""
    return streamed_bytes(states, own_master=has_own_masters(run))


def matrix_element_bytes(run: TrainingRun, states: StreamedStates) -> float:
    """Return the same of an element that Muon updates."""
    return FORMS[states].signed_bytes(MUON_MOMENTS, is_own_master=has_own_masters(run))


def chunk_elements(states: StreamedStates, *, own_master: bool = False) -> int:
    """Return how many elements one chunk has."""
    return int(sizes.STATE_CHUNK_BYTES // streamed_bytes(states, own_master=own_master))


def ring_bytes(run: TrainingRun, states: StreamedStates, streamed: int) -> int:
    """Return the GPU bytes that streaming so many elements needs: slots of a chunk, and the scratch of one update."""
    if run.matrices is not None:
        return _ring_of_matrices(run, run.matrices, states, streamed)
    elements = chunk_elements(states, own_master=has_own_masters(run))
    slots = min(sizes.LEAST_SLOTS, -(-streamed // elements))
    each_bytes = element_bytes(run, states) * slots + scratch_of(run, states)
    return round(each_bytes * min(streamed, elements))


def _ring_of_matrices(run: TrainingRun, matrices: Matrices, states: StreamedStates, streamed: int) -> int:
    """Return the same where Muon updates some: a slot holds the largest matrix, and one more scratch serves all."""
    each_bytes = matrix_element_bytes(run, states)
    chunk = max(int(sizes.STATE_CHUNK_BYTES // each_bytes), matrices.longest_shard(run.weight_shards))
    slots = min(sizes.LEAST_SLOTS, -(-streamed // chunk))
    return round(each_bytes * slots * min(streamed, chunk)) + scratch_of_matrices(
        run, matrices, states, min(streamed, chunk)
    )


def scratch_of_matrices(run: TrainingRun, matrices: Matrices, states: StreamedStates, chunk: int) -> int:
    """Return the GPU bytes that the update of a chunk of so many elements of matrices needs beside the slot."""
    form = FORMS[states]
    # Momentum is widened for the update, one matrix at a time: a chunk's scratch is fp32.
    widened = FP32_BYTES * matrices.largest if form.moment_bytes < FP32_BYTES else 0
    each_bytes = scratch_bytes(
        has_half_masters=form.master_bytes < FP32_BYTES and not has_own_masters(run), is_rounded=False
    )
    return round(each_bytes * chunk) + matrices.work_bytes + widened + _crossing_bytes(run, matrices, chunk)


def _crossing_bytes(run: TrainingRun, matrices: Matrices, chunk: int) -> int:
    """Return the buffer of directions (bf16) that ranks exchange: shards of so many elements, and the wholes of one."""
    if not run.is_fully_sharded:
        return 0
    owned = -(-chunk // matrices.largest) * matrices.largest
    return BF16_BYTES * (chunk + owned)


def scratch_of(run: TrainingRun, states: StreamedStates) -> int:
    """Return the GPU bytes of an element of one chunk that its update needs beside the slot."""
    form = FORMS[states]
    return scratch_bytes(
        has_half_masters=form.master_bytes < FP32_BYTES and not has_own_masters(run),
        is_rounded=form.moment_bytes < FP32_BYTES,
    )


def has_own_masters(run: TrainingRun) -> bool:
    """Return whether weights are their own masters, in fp32."""
    return run.precision.weight_bytes >= FP32_BYTES
