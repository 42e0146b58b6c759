# SPDX-License-Identifier: Apache-2.0
"""The shape of a decoder: the dozen numbers from which every count of parameters, bytes and FLOPs follows.

Memory and time are computed from a `ModelShape`; where it came from (a configuration, a config.json, a known
name) is decided in `planning/model/shape_sources.py`. It describes text decoders: dense, grouped-query, multi-head
latent attention (MLA), mixture of experts with shared experts, multi-token prediction (MTP). State-space and
linear-attention layers and vision towers are not described, and a source that has them is refused.
"""

from typing import NamedTuple

from skill_tools.errors import UnusableInput


class ModelShape(NamedTuple):
    """One decoder. Sizes are elements; `ffn` is one MLP's inner size, `moe_ffn` one expert's.

    `head_dim` 0 means hidden / heads. Norms of query and key span one head, with `qk_norm_whole` all of them (OLMo 2).
    With `fused_qkv` one linear layer makes queries, keys and values (Phi-3).
    `shared_ffn` is the inner size of all shared experts together. `first_dense` layers at the front and, with
    `moe_every` > 1, the layers between are dense. MLA is on when `kv_lora_rank` > 0; `q_lora_rank` 0 then means a
    full query projection.
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    gated_mlp: bool = True
    tied_embeddings: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    fused_qkv: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    attention_sinks: bool = False
    learned_positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    first_dense: int = 0
    moe_every: int = 1
    moe_pattern: tuple[bool, ...] = ()
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    mtp_layers: int = 0

    @property
    def attention_head_dim(self) -> int:
        """Elements of one query head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def uses_mla(self) -> bool:
        """Whether attention keys and values go through a low-rank latent."""
        return self.kv_lora_rank > 0

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts instead of one MLP."""
        if self.moe_pattern:
            return self.moe_pattern[layer]
        if not self.experts or layer < self.first_dense:
            return False
        return (layer + 1) % self.moe_every == 0


MOST_LAYERS = 1024
LARGEST_SIZE = 2**26


def checked(shape: ModelShape) -> ModelShape:
    """Return `shape`, or raise `UnusableInput` where its sizes contradict each other."""
    positive = ("num_layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
    values = (shape.num_layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.vocab)
    for name, value in zip(positive, values, strict=True):
        most = MOST_LAYERS if name == "num_layers" else LARGEST_SIZE
        if not 0 < value <= most:
            raise _contradiction(shape, f"{name} is {value}", f"a number above zero, at most {most}")
    if not shape.head_dim and not shape.uses_mla and shape.hidden % shape.heads:
        raise _contradiction(
            shape,
            f"hidden size {shape.hidden} does not divide into {shape.heads} heads",
            "a multiple of the heads",
        )
    if shape.heads % shape.kv_heads:
        raise _contradiction(
            shape,
            f"{shape.heads} heads do not divide into {shape.kv_heads} key-value groups",
            "a divisor of heads",
        )
    if shape.experts and not 0 < shape.experts_per_token <= shape.experts:
        raise _contradiction(
            shape,
            f"{shape.experts_per_token} of {shape.experts} experts per token",
            "1 to all of the experts",
        )
    if shape.experts and shape.moe_ffn <= 0:
        raise _contradiction(
            shape, f"{shape.experts} experts with moe_ffn {shape.moe_ffn}", "the inner size of an expert"
        )
    if shape.moe_pattern and len(shape.moe_pattern) != shape.num_layers:
        raise _contradiction(
            shape,
            f"the MoE pattern names {len(shape.moe_pattern)} layers of {shape.num_layers}",
            "one entry a layer",
        )
    return shape


def _contradiction(shape: ModelShape, problem: str, expected: str) -> UnusableInput:
    return UnusableInput(
        f"the shape of {shape.name} contradicts itself: {problem}",
        expected=expected,
        attempt="correct the size, or name a known model with --model",
    )
