"""Bytes of states that stream through the GPU in chunks, by their form: of an element, of a ring of slots, of scratch.

An fp32 weight is its own master, so that only its moments stream. Forms are those of `reference_impl`'s `Streaming`,
explained in docs/optimizer-state-offloading.md.
"""

from skill_tools.dialects.run import Run, StreamedStates
from skill_tools.planning.model import reference_numbers as reference


def streamed_bytes(states: StreamedStates, *, own_master: bool = False) -> float:
    """Return the bytes of an element's states, which cross the link each way."""
    master_bytes, moments_bytes = reference.STREAMED_STATES[states]
    return moments_bytes if own_master else master_bytes + moments_bytes


def element_bytes(run: Run, states: StreamedStates) -> float:
    """Return the same for the weights of `run`."""
    return streamed_bytes(states, own_master=has_own_masters(run))


def chunk_elements(states: StreamedStates, *, own_master: bool = False) -> int:
    """Return how many elements one chunk has."""
    return int(reference.CHUNK_BYTES // streamed_bytes(states, own_master=own_master))


def ring_bytes(run: Run, states: StreamedStates, streamed: int) -> int:
    """Return the GPU bytes that streaming so many elements needs: slots of a chunk, and the scratch of one update."""
    elements = chunk_elements(states, own_master=has_own_masters(run))
    slots = min(reference.SLOTS, -(-streamed // elements))
    each_bytes = element_bytes(run, states) * slots + scratch_bytes(run, states)
    return round(each_bytes * min(streamed, elements))


def scratch_bytes(run: Run, states: StreamedStates) -> float:
    """Return the GPU bytes of an element of one chunk that its update needs beside the slot.

    Exact states have their gradients in fp32 there, for torch's own kernel, and half masters the whole ones and their
    weights too. Packed ones of shards have gradients and weights, so that one kernel updates all short pieces of a
    chunk; the kernels of others read them where they are.
    """
    if states is StreamedStates.EXACT:
        return reference.GRADIENT_BYTES if has_own_masters(run) else reference.HALF_MASTER_SCRATCH_BYTES
    is_joined = states is StreamedStates.PACKED and run.is_fully_sharded
    return reference.GRADIENT_BYTES + run.precision.weight_bytes if is_joined else 0


def has_own_masters(run: Run) -> bool:
    """Return whether weights are their own masters, in fp32."""
    return run.precision.weight_bytes >= 4
