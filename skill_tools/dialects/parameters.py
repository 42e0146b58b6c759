# SPDX-License-Identifier: Apache-2.0
"""Counts parameters: of one part, of the whole model, and of one GPU of a pipeline stage.

Every count is split by how parallelism divides it: `split` over tensor parallelism, `replicated` on every
tensor-parallel rank, `expert` over expert (and expert-tensor) parallelism. The sums over a model are held
against the published totals of `knowledge/models.yaml` in the tests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from skill_tools.dialects.shapes import ModelShape


class Parameters(NamedTuple):
    """A number of parameters, by how parallelism divides them."""

    split: int = 0
    replicated: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """All of them, before any division."""
        return self.split + self.replicated + self.expert


def together(*counts: Parameters) -> Parameters:
    """Add counts, each kind on its own."""
    return Parameters(*map(sum, zip(*counts, strict=True)))


def attention(shape: ModelShape) -> Parameters:
    """Count one attention block without its norm."""
    if shape.uses_mla:
        return _latent_attention(shape)
    head = shape.attention_head_dim
    queries, keys = shape.heads * head, shape.kv_heads * head
    split = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    normed = queries + keys if shape.qk_norm_whole else 2 * head
    replicated = normed if shape.qk_norm else 0
    if shape.qkv_bias or shape.linear_bias:
        split += queries + 2 * keys
    if shape.linear_bias:
        replicated += shape.hidden
    if shape.attention_sinks:
        split += shape.heads
    return Parameters(split, replicated)


def _latent_attention(shape: ModelShape) -> Parameters:
    query_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    kv_dim = shape.qk_nope_head_dim + shape.v_head_dim
    replicated = shape.hidden * (shape.kv_lora_rank + shape.qk_rope_head_dim) + shape.kv_lora_rank
    split = shape.kv_lora_rank * shape.heads * kv_dim + shape.heads * shape.v_head_dim * shape.hidden
    if shape.q_lora_rank:
        replicated += shape.hidden * shape.q_lora_rank + shape.q_lora_rank
        split += shape.q_lora_rank * shape.heads * query_dim
    else:
        split += shape.hidden * shape.heads * query_dim
    return Parameters(split, replicated)


def mlp(shape: ModelShape, inner: int) -> int:
    """Count one MLP of inner size `inner` (an expert, a shared expert or the dense MLP)."""
    columns = 2 * inner if shape.gated_mlp else inner
    weights = shape.hidden * columns + inner * shape.hidden
    return weights + (columns + shape.hidden if shape.linear_bias else 0)


def norm(shape: ModelShape) -> int:
    """Count one normalization over the hidden size."""
    return shape.hidden * (2 if shape.norm_bias else 1)


def layer(shape: ModelShape, *, moe: bool) -> Parameters:
    """Count one decoder layer."""
    norms = Parameters(replicated=shape.norms_per_layer * norm(shape))
    if not moe:
        return together(attention(shape), norms, Parameters(split=mlp(shape, shape.ffn)))
    router = shape.hidden * shape.experts + (shape.experts if shape.linear_bias else 0)
    shared = mlp(shape, shape.shared_ffn) if shape.shared_ffn else 0
    experts = Parameters(shared, router, shape.experts * mlp(shape, shape.moe_ffn))
    return together(attention(shape), norms, experts)


def mtp_layer(shape: ModelShape) -> Parameters:
    """Count one multi-token-prediction layer: a decoder layer, the joining projection and three norms."""
    own = Parameters(split=2 * shape.hidden * shape.hidden, replicated=3 * norm(shape))
    return together(layer(shape, moe=shape.is_moe(shape.num_layers - 1)), own)


def embedding(shape: ModelShape) -> Parameters:
    """Count the token table and learned positions."""
    return Parameters(split=shape.vocab * shape.hidden, replicated=shape.learned_positions * shape.hidden)


def head(shape: ModelShape) -> Parameters:
    """Count the final norm and the output projection, which a tied model shares with the embedding."""
    projection = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
    return Parameters(split=projection, replicated=norm(shape))


def model(shape: ModelShape) -> Parameters:
    """Count the whole model without MTP layers, as published totals do."""
    return together(embedding(shape), head(shape), layers(shape, range(shape.num_layers)))


def layers(shape: ModelShape, indices: Sequence[int]) -> Parameters:
    """Count the decoder layers `indices`."""
    moe = sum(1 for index in indices if shape.is_moe(index))
    dense_layer, moe_layer = layer(shape, moe=False), layer(shape, moe=True) if moe else Parameters()
    dense = len(indices) - moe
    return Parameters(
        dense * dense_layer.split + moe * moe_layer.split,
        dense * dense_layer.replicated + moe * moe_layer.replicated,
        moe * moe_layer.expert,
    )


def active(shape: ModelShape) -> int:
    """Count the parameters that one token passes through."""
    whole = model(shape)
    if not shape.experts:
        return whole.total
    return whole.split + whole.replicated + whole.expert * shape.experts_per_token // shape.experts


def lora(shape: ModelShape, rank: int) -> int:
    """Count rank-`rank` LoRA on every linear layer of attention and dense MLPs (experts are left out)."""
    queries = shape.heads * shape.attention_head_dim
    keys = shape.kv_heads * shape.attention_head_dim
    each = 2 * shape.hidden + 2 * queries + 2 * (shape.hidden + keys)
    dense = sum(1 for layer in range(shape.num_layers) if not shape.is_moe(layer))
    inner = (3 if shape.gated_mlp else 2) * (shape.hidden + shape.ffn)
    return rank * (shape.num_layers * each + dense * inner)
