"""Bytes of a model whose trained layers stream: what the GPU holds of them, and the host item by item.

`reference_impl.TrainableLayerStreamer` keeps weights, gradients and states of all blocks on the host. The GPU has a
window of blocks, the gradients that are being made or leave, and a ring of state chunks with their gradients; what
stands outside the blocks has its weights there alone. Explained in docs/larger-than-gpu.md.
"""

from typing import NamedTuple

from skill_tools.dialects import parameters
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import Mode, Run, StreamedStates
from skill_tools.planning.accounts import Line, each
from skill_tools.planning.model import reference_numbers as reference


class Sizes(NamedTuple):
    """Elements: of all blocks, of the largest one, of what stands outside them, and of its largest table."""

    in_blocks: int
    block: int
    outside: int
    table: int


def sizes(run: Run, held: int) -> Sizes:
    """Return how the `held` parameters of the model are divided: those of blocks as the shape says they are."""
    shape = run.shape
    table = shape.vocab * shape.hidden
    outside = min(parameters.embedding(shape).total + parameters.head(shape).total, held)
    blocks = [parameters.layer(shape, moe=shape.is_moe(index)).total for index in range(shape.num_layers)]
    in_blocks = held - outside
    return Sizes(in_blocks, round(max(blocks) * in_blocks / sum(blocks)), outside, table)


def lines(run: Run, mode: Mode, local: LocalParameters) -> tuple[list[Line], list[Line]]:
    """Return the GPU lines and the host lines of weights, gradients and states."""
    size, held = sizes(run, local.total), local.total
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    blocks = min(reference.TRAINED_WINDOW_LAYERS, run.shape.num_layers)
    leaving = size.block + max(size.block, size.table)
    states_bytes = streamed_bytes(mode.streamed_states)
    elements = chunk_elements(mode.streamed_states, size)
    gpu = [
        Line(
            "weights outside the blocks",
            round(weight_bytes * size.outside),
            each(weight_bytes, size.outside, ""),
        ),
        Line(
            "window of blocks", round(weight_bytes * blocks * size.block), f"{blocks} blocks, 2 of them ahead"
        ),
        Line(
            "gradients that leave",
            round(gradient_bytes * leaving),
            "one block's while they are made, and one block or table on its way",
            # A trace says of its spans alone what they hold.
            "recompute" if run.traced is None else "step",
        ),
        Line(
            "streaming slots",
            round(chunk_bytes(mode.streamed_states, gradient_bytes) * elements),
            f"{reference.SLOTS} chunks of {elements:,} elements with their gradients, and the update's scratch",
        ),
    ]
    host = [
        Line(
            "weights of blocks", round(weight_bytes * size.in_blocks), each(weight_bytes, size.in_blocks, "")
        ),
        Line("gradients", round(gradient_bytes * held), each(gradient_bytes, held, "parameters")),
        Line(
            "masters and moments", round(states_bytes * held), each(states_bytes, held, mode.streamed_states)
        ),
    ]
    return gpu, host


def streamed_bytes(states: StreamedStates) -> float:
    """Return the bytes of an element's states, which cross the link each way; exact ones have half masters."""
    return sum(reference.TRAINED_STATES[states])


def chunk_elements(states: StreamedStates, size: Sizes) -> int:
    """Return the elements of the longest chunk: none has more than a block's, or than all that stands outside them."""
    return min(int(reference.CHUNK_BYTES // streamed_bytes(states)), max(size.block, size.outside))


def chunk_bytes(states: StreamedStates, gradient_bytes: float) -> float:
    """Return the GPU bytes of an element in all slots, and in the scratch that only exact states need."""
    scratch_bytes = reference.HALF_MASTER_SCRATCH_BYTES if states is StreamedStates.EXACT else 0
    return reference.SLOTS * (streamed_bytes(states) + gradient_bytes) + scratch_bytes
