# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model whose trained layers stream: on the GPU, and on the host item by item.

`reference_impl.TrainableLayerStreamer` keeps weights, gradients and states of all blocks on the host. The GPU has a
window of blocks and the gradients that are being made or leave; tensors outside the blocks have their weights there
alone. From the step until backward reaches a layer, a ring of state chunks with their gradients is there too, and
always where backward updates. Explained in docs/larger-than-gpu.md.
"""

import math
from typing import NamedTuple

from offload_arithmetic import sizes as buffers
from offload_arithmetic.states import ADAM_BYTES, FP32_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.planning.accounts import Kind, Line, each
from skill_tools.planning.model import streamed_states


class Sizes(NamedTuple):
    """Elements: of all blocks, of the largest one, of the modules outside them, and of their largest table."""

    in_blocks: int
    block: int
    outside: int
    table: int


def sizes(run: TrainingRun, held: int) -> Sizes:
    """Return how the `held` parameters of the model are divided: those of blocks as the shape says they are."""
    shape = run.shape
    table = shape.vocab * shape.hidden
    outside = min(parameters.embedding(shape).total + parameters.head(shape).total, held)
    layers = range(shape.num_layers)
    largest = max(parameters.layer(shape, moe=moe).total for moe in {shape.is_moe(index) for index in layers})
    in_blocks = held - outside
    block = round(largest * in_blocks / parameters.layers(shape, layers).total)
    return Sizes(in_blocks, block, outside, table)


def lines(run: TrainingRun, mode: Mode, local: LocalParameters) -> tuple[list[Line], list[Line]]:
    """Return the GPU lines and the host lines of weights, gradients and states."""
    size, held = sizes(run, local.total), local.total
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    streamed = streamed_share(run, mode)
    # Weights that backward has updated have been used, and stay for the time of another block.
    blocks = min(1 + buffers.PREFETCHED_LAYERS + mode.updates_in_backward, run.shape.num_layers)
    # Gradients of several slices add up in fp32.
    made_bytes = max(gradient_bytes, FP32_BYTES) if mode.slices > 1 else gradient_bytes
    gpu = [
        Line(
            Kind.WEIGHTS,
            "weights outside the blocks",
            round(weight_bytes * size.outside),
            each(weight_bytes, size.outside, ""),
        ),
        *_resident(run, mode, size, held),
        Line(
            Kind.VISITING_WEIGHTS,
            "window of blocks",
            round(weight_bytes * blocks * size.block * streamed),
            f"{blocks} blocks, 2 of them ahead",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradients of a block",
            round(made_bytes * size.block),
            f"{each(made_bytes, size.block, 'parameters')}, while they are made{', in fp32' * (mode.slices > 1)}",
            "recompute",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradients that leave",
            round(gradient_bytes * max(size.block, size.table)),
            f"one block or table {'being used' if mode.updates_in_backward else 'on its way'}",
            "leaving",
        ),
        *_in_head(run, size),
        *_slots(run, mode, size, streamed),
    ]
    host = [
        Line(
            Kind.WEIGHTS,
            "weights of blocks",
            round(weight_bytes * size.in_blocks * streamed),
            each(weight_bytes, round(size.in_blocks * streamed), ""),
        ),
        *_states(run, mode, held),
    ]
    if not mode.updates_in_backward:
        host.insert(
            1,
            Line(
                Kind.GRADIENTS,
                "gradients",
                round(gradient_bytes * held),
                each(gradient_bytes, held, "parameters"),
            ),
        )
    return gpu, host


def streamed_share(run: TrainingRun, mode: Mode) -> float:
    """Return the share of the blocks' weights that are on the host: every block keeps the same share of its own."""
    return 1 - mode.resident_layers / run.shape.num_layers


def _resident(run: TrainingRun, mode: Mode, size: Sizes, held: int) -> list[Line]:
    """Return the bytes of the blocks' weights and of the states that stay on the GPU."""
    found = []
    if mode.resident_layers:
        stays = round(run.precision.weight_bytes * size.in_blocks * (1 - streamed_share(run, mode)))
        found.append(
            Line(Kind.WEIGHTS, "resident weights of blocks", stays, f"{mode.resident_layers} layers' worth")
        )
    if mode.states_resident:
        states_bytes = streamed_states.element_bytes(run, mode.streamed_states)
        stay = round(mode.states_resident * held)
        formula = each(states_bytes, stay, mode.streamed_states)
        found.append(
            Line(Kind.OTHER_STATES, "resident masters and moments", round(states_bytes * stay), formula)
        )
    return found


def _states(run: TrainingRun, mode: Mode, held: int) -> list[Line]:
    """Return the bytes of states on the host: the streamed ones, and in fp32 the CPU's."""
    states_bytes = streamed_states.element_bytes(run, mode.streamed_states)
    pass_ = round(mode.states_streamed * held)
    found = [
        Line(
            Kind.OTHER_STATES,
            "masters and moments",
            round(states_bytes * pass_),
            each(states_bytes, pass_, mode.streamed_states),
        )
    ]
    if mode.states_on_cpu:
        updated = round(mode.states_on_cpu * held)
        formula = each(ADAM_BYTES, updated, "updated on the CPU, pageable")
        found.append(
            Line(
                Kind.PAGEABLE_STATES,
                "masters and moments on the CPU",
                ADAM_BYTES * updated,
                formula,
            )
        )
    return found


def _in_head(run: TrainingRun, size: Sizes) -> list[Line]:
    """Return what the head's backward makes: the gradients of its output and of its weight.

    A fused loss has made both, chunk by chunk.
    """
    if run.fused_loss:
        return []
    logits = run.precision.weight_bytes * run.tokens * run.shape.vocab
    gradient = run.precision.gradient_bytes * size.table
    formula = f"{run.tokens:,} tokens x {run.shape.vocab:,} logits, and {size.table:,} parameters"
    return [Line(Kind.OTHER_GRADIENTS, "gradients of the head", round(logits + gradient), formula, "head")]


def _slots(run: TrainingRun, mode: Mode, size: Sizes, streamed: float) -> list[Line]:
    """Return the slots of chunks that come in with their gradients, those of gradients alone, and one chunk's scratch.

    A block's states on the host are cut into chunks of one length, and so are all that stay on the GPU.
    """
    if run.matrices is not None:
        return _slots_of_matrices(run, run.matrices, mode, size)
    states_bytes = streamed_states.element_bytes(run, mode.streamed_states)
    gradient_bytes = 0 if mode.updates_in_backward else run.precision.gradient_bytes
    most = buffers.STATE_CHUNK_BYTES // states_bytes
    parts = (streamed * size.block, size.outside + round((1 - streamed) * size.in_blocks))
    passes, stays = (
        max(longest_chunk(round(share * numel), most) for numel in parts)
        for share in (mode.states_streamed, mode.states_resident)
    )
    slots_bytes = buffers.LEAST_SLOTS * ((states_bytes + gradient_bytes) * passes + gradient_bytes * stays)
    formula = f"{buffers.LEAST_SLOTS} chunks of {passes:,} elements"
    if gradient_bytes:
        formula += f" with their gradients{f', as many of {stays:,} for gradients alone' if stays else ''}"
    scratch = streamed_states.scratch_of(run, mode.streamed_states) * max(passes, stays)
    return _ring(mode, round(slots_bytes), scratch, formula)


def _ring(mode: Mode, slots_bytes: int, scratch_bytes: int, formula: str) -> list[Line]:
    """Return the slots, which leave as backward begins unless it updates, and the scratch, which stays."""
    when = "always" if mode.updates_in_backward else "until backward"
    slots = Line(Kind.OTHER_STATES, "streaming slots", slots_bytes, formula, when)
    scratch = Line(Kind.OTHER_STATES, "scratch of an update", scratch_bytes, "of one chunk")
    return [slots, scratch] if scratch_bytes else [slots]


def _slots_of_matrices(run: TrainingRun, matrices: Matrices, mode: Mode, size: Sizes) -> list[Line]:
    """Return the same where Muon updates the blocks' matrices, whole ones, and AdamW weights outside the blocks."""
    gradient_bytes = 0 if mode.updates_in_backward else run.precision.gradient_bytes
    of_matrix = streamed_states.matrix_element_bytes(run, mode.streamed_states)
    of_table = streamed_states.outside_element_bytes(run, mode.streamed_states)
    # As many matrices as a chunk may have, of a block.
    most = min(max(int(buffers.STATE_CHUNK_BYTES // of_matrix), matrices.largest), size.block)
    table = longest_chunk(size.outside, buffers.STATE_CHUNK_BYTES // of_table)
    slot_bytes = max((of_matrix + gradient_bytes) * most, (of_table + gradient_bytes) * table)
    alone_bytes = gradient_bytes * max(most, table) if mode.states_resident else 0
    scratch = max(
        streamed_states.scratch_of_matrices(run, matrices, mode.streamed_states, most),
        round(streamed_states.scratch_of(run, mode.streamed_states) * table) + matrices.work_bytes,
    )
    formula = f"{buffers.LEAST_SLOTS} chunks of whole matrices, {most:,} elements"
    slots_bytes = round(buffers.LEAST_SLOTS * (slot_bytes + alone_bytes))
    return _ring(mode, slots_bytes, scratch, formula + ", with their gradients" * bool(gradient_bytes))


def longest_chunk(numel: float, most: float) -> int:
    """Return the elements of the longest of the chunks into which `numel` are cut, all of one length but the last."""
    return math.ceil(numel / math.ceil(numel / most)) if numel else 0
