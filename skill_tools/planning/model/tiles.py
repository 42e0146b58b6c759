# SPDX-License-Identifier: Apache-2.0
"""The memory of one layer's backward where MLP, experts and norms take a tile of the sequence at a time.

Of all positions there are then the inputs and outputs of these modules, and the tensors that attention has saved. The
most is alive
in one of two moments: while the MLP's tiles are differentiated, or in attention's backward, of one group of heads where
it takes several. Explained in docs/long-sequences.md.
"""

from collections.abc import Mapping

from offload_arithmetic.states import FP32_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.run import Mode, TrainingRun

# Parts of a layer that every position has in both moments, beside queries, keys and values.
_STAYS = ("attention output", "attention log-sum-exp and norm scales", "MLA latents")


def are_used(run: TrainingRun, mode: Mode) -> bool:
    """Whether sequences are longer than a tile; others run without tiles."""
    return 0 < mode.tile_tokens < run.seq_length


def needed_bytes(
    run: TrainingRun, mode: Mode, parts: Mapping[str, float], tokens: float, inner: float, *, moe: bool
) -> float:
    """Return the bytes that a layer's backward needs at once.

    `parts` are the layer's saved tensors in bytes a token, without tiles all alive at once beside the `inner` bytes of
    the MLP's gradients.
    """
    whole = sum(parts.values()) * tokens + inner
    share = mode.tile_tokens / run.seq_length
    in_mlp = share * whole + (1 - share) * _in_mlp(run, mode, parts) * tokens + _sums(run, moe=moe)
    return max(in_mlp, _in_attention(run, mode, parts) * tokens)


def _sums(run: TrainingRun, *, moe: bool) -> float:
    """Bytes of the fp32 sums of a module's gradients, and of a tile's gradients, which are added to them."""
    if run.adapter is not None:
        return 0.0
    shape = run.shape
    whole, attention = parameters.layer(shape, moe=moe).total, parameters.attention(shape).total
    return (FP32_BYTES + run.precision.gradient_bytes) * (whole - attention) * run.trained_share


def _in_mlp(run: TrainingRun, mode: Mode, parts: Mapping[str, float]) -> float:
    """Bytes a token that are there while the MLP's tiles are differentiated."""
    # The layer's input, the first norm's output, the MLP's norm's input and output; both gradients of the MLP.
    kept = 0.0 if mode.head_groups else _of_heads(run, parts)
    return 6 * 2 * run.shape.hidden + _of_all(parts) + kept


def _in_attention(run: TrainingRun, mode: Mode, parts: Mapping[str, float]) -> float:
    """Bytes a token that are there in attention's backward, with the gradients of one group of heads, or of all.

    Those of keys and values are made for every head, those of queries in fp32 too.
    """
    shape = run.shape
    width = 2 * shape.heads * shape.attention_head_dim
    made = 0 if shape.uses_mla else 2 * width
    of_heads = (
        _of_heads(run, parts) + parts["query, key, value"] + parts["attention output"] + made + 2 * width
    )
    # The layer's input, the first norm's output, the gradient that goes around attention.
    others = 3 * 2 * shape.hidden + _of_all(parts)
    if not mode.head_groups:
        return others + of_heads
    if run.adapter is not None:
        # Each group runs the linear layer behind attention again: the base's output, the adapter's, and their sum.
        others += 3 * 2 * shape.hidden
    # Norms of a group run whole, and the gradients of the input add up.
    in_group = of_heads + parts.get("query and key norm output", 0.0)
    return others + FP32_BYTES * shape.hidden + in_group / mode.head_groups


def _of_all(parts: Mapping[str, float]) -> float:
    """Bytes a token that attention saves for all heads together, and its kernel's remaining bytes."""
    return sum(parts.get(name, 0.0) for name in _STAYS)


def _of_heads(run: TrainingRun, parts: Mapping[str, float]) -> float:
    """Bytes a token of queries, keys and values; norms of query and key keep their inputs."""
    shape = run.shape
    before_norms = 2 * (shape.heads + shape.kv_heads) * shape.attention_head_dim if shape.qk_norm else 0
    return parts["query, key, value"] + before_norms
