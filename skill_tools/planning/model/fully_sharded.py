# SPDX-License-Identifier: Apache-2.0
"""Bytes that FSDP2 needs beside a rank's shards while it trains a plain loop's model, block by block.

Backward holds two gathered blocks: the running one, and the next one, gathered meanwhile. It holds the gradients of the
running block, and those of the block before, laid out for their reduce-scatter. Embedding and head are gathered, freed
and reduced as blocks are. With a large vocabulary, each is as large as several blocks. A tied table belongs to the
root, and stays gathered from forward to the end of backward.

Explained in docs/distributed.md.
"""

from functools import lru_cache

from offload_arithmetic import sizes as buffers
from offload_arithmetic.division import first_unit_streams, most_of_a_cut_unit
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import Mode, OptimizerEngine, TrainingRun
from skill_tools.planning.accounts import Kind, Line, each
from skill_tools.planning.model import streamed_states
from skill_tools.planning.model.activations import loss_bytes
from skill_tools.planning.model.trained_layers import Sizes, longest_chunk, sizes

_UNCOUNTED = (
    3  # blocks whose reduced gradients do not count as in flight: one is reduced, two are partly copied
)


def lines(run: TrainingRun, held: int) -> list[Line]:
    """Return the lines of one rank of `run`, whose model has `held` parameters."""
    assert run.spread is not None
    size, wide, reduced_bytes = _sizes(run, held), run.spread.gathered_bytes, run.spread.reduced_bytes
    reduced = size.block if run.adapter is None else run.adapter.parameters // run.shape.num_layers
    found = [
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered blocks",
            round(2 * wide * size.block),
            f"2 x {each(wide, size.block, 'parameters')}: the one that runs, and the next one",
            "recompute",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradients of two blocks",
            round((wide + reduced_bytes) * reduced),
            f"{each(wide, reduced, 'parameters')} as they are made, "
            f"{reduced_bytes:g} B each of the block before in its reduce-scatter",
            "recompute",
        ),
    ]
    ends = _tied_table(run, size) if run.shape.tied_embeddings else _table_and_head(run, size)
    return [*found, *ends]


def _table_and_head(run: TrainingRun, size: Sizes) -> list[Line]:
    """Return the bytes of an embedding and a head of their own: gathered as blocks are, with gradients like theirs."""
    assert run.spread is not None
    wide, reduced_bytes = run.spread.gathered_bytes, run.spread.reduced_bytes
    logits = _logits_bytes(run)
    gathered = wide * size.table
    trains = run.adapter is None
    made, reduced = (gathered, reduced_bytes * size.table) if trains else (0.0, 0.0)
    block, block_reduced = wide * size.block, reduced_bytes * size.block if trains else 0.0
    return _some(
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered in forward",
            round(max(2 * block, block + gathered, 2 * gathered, gathered + logits)),
            "two blocks, or the head and the last block, or the head while it is copied out, or with its logits",
            "forward",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered head",
            round(gathered if _computes_its_loss(run) else 0),
            "which backward gathers first, because the loss is of the root's forward",
            "loss",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "head in backward",
            round(max(logits + gathered + made, made + reduced + block)),
            "the gradient of the logits, the gathered head and its gradient, which then is reduced",
            "head",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradient of the head in its reduce-scatter",
            round(max(reduced - block_reduced, 0)),
            "beyond a block's",
            "last block",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered embedding",
            round(max(made - block, 0)),
            "beyond a block, which it comes after",
            "first block",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "embedding in backward",
            round(max(gathered + made + block_reduced, made + reduced) if trains else 0),
            "the gathered table and its gradient, which then is reduced",
            "embedding",
        ),
    )


def _tied_table(run: TrainingRun, size: Sizes) -> list[Line]:
    """Return the bytes of a tied table, which is gathered for the whole step; its gradient waits for the embedding's.

    A trace has seen that gradient wait.
    """
    assert run.spread is not None
    gathered, block = run.spread.gathered_bytes * size.outside, run.spread.gathered_bytes * size.block
    logits = _logits_bytes(run)
    made = gathered if run.adapter is None else 0.0
    reduced = run.spread.reduced_bytes * (size.outside + size.block) if run.adapter is None else 0.0
    formula = each(run.spread.gathered_bytes, size.outside, "parameters of the root")
    return _some(
        Line(
            Kind.VISITING_WEIGHTS, "gathered table", round(gathered), f"{formula}, for the whole step", "step"
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered in forward",
            round(max(2 * block, gathered, logits)),
            "two blocks, or the root while it is copied out, or the logits",
            "forward",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "head in backward",
            round(logits + made),
            "the gradients of the logits and of the table",
            "head",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "the head's gradient of the tied table",
            round(made if run.traced is None else 0),
            f"{formula}, which waits for the embedding's",
            "recompute",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradient of the tied table in its reduce-scatter",
            round(reduced),
            "beside the last reduced block's; the sum of both gradients is in place of the gathered table",
            "embedding",
        ),
    )


def _computes_its_loss(run: TrainingRun) -> bool:
    """Return whether the model's forward ends in the loss, as in a traced Hugging Face model.

    FSDP2 gathers ahead once backward enters the root: there, before the loss's backward.
    """
    return run.traced is not None


def _logits_bytes(run: TrainingRun) -> float:
    """Return the bytes of the logits as the head makes them, all at once or a chunk of them."""
    assert run.spread is not None
    return loss_bytes(run, run.spread.gathered_bytes * run.tokens * run.shape.vocab)


def _some(*found: Line) -> list[Line]:
    return [line for line in found if line.bytes]


def around_groups(run: TrainingRun, layer: int, ends: int) -> list[Line]:
    """Return FSDP2's bytes beside a rank's shards where a trainer wraps layers of so many elements, and the root.

    `ends` are the root's: embedding and head; a vision tower is gathered with them. Frozen weights are gathered as they
    are, 4-bit ones packed, and have no gradients; the ends are never packed. Collectives run on streams of their own,
    and memory that the allocator has given to one stream no other takes. So the flat buffers of gathers and
    reduce-scatters stay reserved beside the tensors that they are copied from and to.
    """
    wide = 2 if run.adapter is None else run.adapter.base_weight_bytes
    root = ends + run.tower
    found = [
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered layers",
            round(2 * wide * layer),
            f"2 layers x {wide:g} B a parameter",
            "step",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered embedding and head",
            2 * root,
            each(2, root, "parameters of the root group"),
            "step",
        ),
    ]
    flat, of = 2 * wide * layer + 2 * root, "gathers of two layers and the root"
    if run.adapter is None:
        found += [
            Line(
                Kind.OTHER_GRADIENTS,
                "gradients of a layer",
                2 * layer,
                each(2, layer, "parameters"),
                "recompute",
            ),
            Line(
                Kind.OTHER_GRADIENTS,
                "gradients of embedding and head",
                2 * ends,
                each(2, ends, "parameters"),
                "recompute",
            ),
        ]
        flat += 2 * layer + 2 * ends
        of += ", reduce-scatters of a layer and the root"
    return (
        [*found, Line(Kind.VISITING_WEIGHTS, "buffers of collectives", round(flat), of, "reserve")]
        if run.reserves
        else found
    )


def gradients_leave(run: TrainingRun, mode: Mode) -> bool:
    """Whether gradients of the CPU's share free memory in backward; where backwards add up, all stay until the last."""
    return mode.optimizer_engine is OptimizerEngine.REFERENCE and run.micro_batches == 1


def cut_block(run: TrainingRun, mode: Mode, shard: int) -> int:
    """Return the elements of the CPU's share of `shard` whose gradients stay beside the streamed chunks.

    Those of one block are parts of one buffer, which stays as long as any of them does.
    """
    if not (run.is_fully_sharded and mode.streamed_fraction):
        return 0
    return most_of_a_cut_unit(_block_shard(run, shard), _on_cpu(mode, shard))


def leaving(run: TrainingRun, mode: Mode, shard: int) -> list[Line]:
    """Return the gradients of the CPU's share of `shard` that have been reduced and not yet copied."""
    on_cpu = _on_cpu(mode, shard) - cut_block(run, mode, shard)
    if not (on_cpu and gradients_leave(run, mode)):
        return []
    wide = run.precision.gradient_bytes
    head = 0 if run.shape.tied_embeddings else table_shard(run)
    # One that is longer waits alone: the head's, the first of all.
    at_once = max(buffers.GRADIENTS_IN_FLIGHT_BYTES, round(wide * head) if head <= on_cpu else 0)
    waiting = at_once + wide * _UNCOUNTED * _block_shard(run, shard)
    formula = f"{at_once >> 20} MiB on their way, and the shards of {_UNCOUNTED} blocks"
    return [
        Line(
            Kind.OTHER_GRADIENTS,
            "gradients to the host",
            round(min(waiting, wide * on_cpu)),
            formula,
            "backward",
        )
    ]


def table_shard(run: TrainingRun) -> int:
    """Return a rank's elements of the embedding, or of the head."""
    return run.shape.vocab * run.shape.hidden // run.weight_shards


def first_ones_stream(mode: Mode) -> bool:
    """Whether the first parameters that are offloaded stream."""
    return first_unit_streams(mode.streamed_fraction, mode.optimizer_fraction)


def table_on_the_cpu(run: TrainingRun, mode: Mode, shard: int) -> list[Line]:
    """Return the bytes of a table updated on the CPU, wholly or beside the GPU's part.

    The first elements of the forward stay, and the table has them. If that cuts it, its gradient stays as a whole, and
    an fp32 weight is no master of its own: both parts change at once.
    """
    table, resident = table_shard(run), round(shard * (1 - mode.optimizer_fraction))
    is_ours = mode.optimizer_engine is OptimizerEngine.REFERENCE
    if not is_ours or first_ones_stream(mode) or resident >= table or run.trained_share < 1:
        return []
    precision = run.precision
    master_bytes = 4 if precision.weight_bytes == 4 else 0
    leaves = precision.gradient_bytes * (table - resident) if gradients_leave(run, mode) else 0
    return _some(
        Line(
            Kind.MASTERS,
            "master weights of a cut table",
            round(master_bytes * resident),
            each(master_bytes, resident, "whose other part the CPU updates"),
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradient of the table",
            round(leaves),
            each(precision.gradient_bytes, table - resident, "that the CPU updates"),
            "backward" if resident else "embedding",
        ),
    )


def _on_cpu(mode: Mode, shard: int) -> int:
    return round((mode.optimizer_fraction - mode.streamed_fraction) * shard)


def _block_shard(run: TrainingRun, shard: int) -> int:
    return _sizes(run, shard * run.weight_shards).block // run.weight_shards


def on_the_host(run: TrainingRun, mode: Mode, local: LocalParameters) -> tuple[list[Line], list[Line]]:
    """Return the GPU lines and the host lines of a rank whose shards, gradients and states live on the host.

    In backward `ShardStreamer` has the shards of the next gather on the GPU. In forward it has those of one gather more
    and chunks of states with their gradients, until the head has made the logits.
    """
    size, shard = _sizes(run, local.total), local.shard
    weight_bytes, gradient_bytes = run.precision.weight_bytes, run.precision.gradient_bytes
    whole = size.outside if run.shape.tied_embeddings else size.table
    largest, block = max(size.block, whole) // run.weight_shards, size.block // run.weight_shards
    states_bytes = streamed_states.element_bytes(run, mode.streamed_states)
    # No chunk has parameters of two gathers.
    most = buffers.SHARD_CHUNK_BYTES // states_bytes
    longest = 0 if run.matrices is None else run.matrices.longest_shard(run.weight_shards)
    elements = max(longest, *(longest_chunk(numel, most) for numel in (largest, block)))
    blocks = buffers.PREFETCHED_GATHERS
    scratch_bytes = round(streamed_states.scratch_of(run, mode.streamed_states) * elements)
    if run.matrices is not None:
        scratch_bytes = streamed_states.scratch_of_matrices(run, run.matrices, mode.streamed_states, elements)
    gpu = [
        Line(
            Kind.VISITING_WEIGHTS,
            "shards of gathers",
            round(blocks * weight_bytes * largest),
            f"{blocks} x {each(weight_bytes, largest, 'parameters of the largest')}",
            "recompute",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "shards of gathers around the loss",
            round(blocks * weight_bytes * largest if _computes_its_loss(run) else 0),
            f"{blocks} x {each(weight_bytes, largest, 'parameters of the largest')}",
            "loss",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "shards of gathers that have come",
            round(blocks * weight_bytes * largest),
            f"{blocks} x {each(weight_bytes, largest, 'parameters of the largest')}",
            "between",
        ),
        Line(
            Kind.VISITING_WEIGHTS,
            "shards of one gather more",
            round(weight_bytes * largest),
            each(weight_bytes, largest, "parameters of the largest"),
            "forward",
        ),
        Line(
            Kind.OTHER_GRADIENTS,
            "gradients to the host",
            round(gradient_bytes * block),
            f"{each(gradient_bytes, block, 'parameters')}: reduced, and on their way",
            "recompute",
        ),
        Line(
            Kind.OTHER_STATES,
            "streaming slots",
            round(buffers.LEAST_SLOTS * (states_bytes + gradient_bytes) * elements),
            f"{buffers.LEAST_SLOTS} chunks of {elements:,} elements with their gradients",
            "between",
        ),
        Line(
            Kind.OTHER_STATES,
            "scratch of an update",
            scratch_bytes,
            f"of one chunk of {elements:,} elements",
        ),
        *lines(run, local.total),
    ]
    host = [
        Line(
            Kind.WEIGHTS,
            "weights",
            round(weight_bytes * shard),
            each(weight_bytes, shard, "parameters of the shards"),
        ),
        Line(
            Kind.GRADIENTS,
            "gradients",
            round(gradient_bytes * shard),
            each(gradient_bytes, shard, "parameters"),
        ),
        Line(
            Kind.OTHER_STATES,
            "masters and moments",
            round(states_bytes * shard),
            each(states_bytes, shard, mode.streamed_states),
        ),
    ]
    return _some(*gpu), host


@lru_cache(maxsize=64)
def _sizes(run: TrainingRun, held: int) -> Sizes:
    """Return how the parameters are divided, which counts every block."""
    return sizes(run, held)
