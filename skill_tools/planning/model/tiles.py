"""What one layer's backward needs less where MLP, experts and norms take a tile of the sequence at a time.

Of all positions there are then the inputs and outputs of these modules, and what attention has saved. The most is alive
in one of two moments: while the MLP's tiles are differentiated, or in attention's backward. Explained in
docs/long-sequences.md.
"""

from collections.abc import Mapping

from offload_arithmetic.states import FP32_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.run import Mode, TrainingRun

# Parts of a layer that every position has in both moments: attention's own, which only its backward uses up.
_OF_ATTENTION = (
    "query, key, value",
    "attention output",
    "attention log-sum-exp and norm scales",
    "MLA latents",
)


def are_used(run: TrainingRun, mode: Mode) -> bool:
    """Whether sequences are longer than a tile: one that is no longer runs as it is."""
    return 0 < mode.tile_tokens < run.seq_length


def spared_bytes(
    run: TrainingRun, mode: Mode, parts: Mapping[str, float], tokens: float, inner: float, *, moe: bool
) -> float:
    """Return the bytes by which tiles lower what a layer's backward needs at once, less than 0 where they add some.

    `parts` are the layer's saved tensors in bytes a token, without tiles all alive at once beside the `inner` bytes of
    the MLP's gradients.
    """
    if not are_used(run, mode):
        return 0.0
    whole = sum(parts.values()) * tokens + inner
    share = mode.tile_tokens / run.seq_length
    in_mlp = share * whole + (1 - share) * _in_mlp(run, parts) * tokens + _sums(run, moe=moe)
    return whole - max(in_mlp, _in_attention(run, parts) * tokens)


def _sums(run: TrainingRun, *, moe: bool) -> float:
    """Bytes of the fp32 sums of a module's gradients, and of a tile's gradients, which are added to them."""
    if run.adapter is not None:
        return 0.0
    shape = run.shape
    whole, attention = parameters.layer(shape, moe=moe).total, parameters.attention(shape).total
    return (FP32_BYTES + run.precision.gradient_bytes) * (whole - attention) * run.trained_share


def _in_mlp(run: TrainingRun, parts: Mapping[str, float]) -> float:
    """Bytes a token of what is there while the MLP's tiles are differentiated."""
    # The layer's input, the first norm's output, the MLP's norm's input and output; both gradients of the MLP.
    return 6 * 2 * run.shape.hidden + _of_attention(run, parts)


def _in_attention(run: TrainingRun, parts: Mapping[str, float]) -> float:
    """Bytes a token of what is there in attention's backward: keys' and values' gradients are made for every head."""
    shape = run.shape
    made = 0 if shape.uses_mla else 2 * 2 * shape.heads * shape.attention_head_dim
    gradients = parts["query, key, value"] + parts["attention output"] + made
    # The layer's input, the first norm's output, the gradient that goes around attention.
    return 3 * 2 * run.shape.hidden + _of_attention(run, parts) + gradients


def _of_attention(run: TrainingRun, parts: Mapping[str, float]) -> float:
    """Bytes a token of what attention has saved; norms of query and key keep their inputs."""
    shape = run.shape
    before_norms = 2 * (shape.heads + shape.kv_heads) * shape.attention_head_dim if shape.qk_norm else 0
    return sum(parts.get(name, 0.0) for name in _OF_ATTENTION) + before_norms
