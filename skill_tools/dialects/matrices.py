# SPDX-License-Identifier: Apache-2.0
"""Muon's part of a model, its FLOPs and its scratch: the matrices of decoder layers.

AdamW has embedding, head, norms and biases. Explained in docs/optimizer-state-offloading.md, "Matrices".
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offload_arithmetic.states import ADAM_MOMENTS, BF16_BYTES, MUON_MOMENTS
from skill_tools.dialects.shapes import ModelShape

ITERATIONS = 5  # of Newton and Schulz's method, `ns_steps` of `torch.optim.Muon`


def newton_schulz_flops(rows: int, columns: int, iterations: int = ITERATIONS) -> int:
    """Return the FLOPs that make one matrix orthogonal: its Gram matrix, that one's square, and their product with it.

    With m the shorter and n the longer side these are products of m n m, m m m and m m n.
    """
    m, n = min(rows, columns), max(rows, columns)
    return iterations * 2 * (m * n * m + m * m * m + m * m * n)


def muon_work_bytes(rows: int, columns: int) -> int:
    """Return the scratch of one matrix, less than four kilobytes of alignment and of numbers.

    These are the matrix twice, its Gram matrix and the Gram matrix's polynomial, all in bf16.
    """
    m = min(rows, columns)
    return 2 * BF16_BYTES * (rows * columns + m * m)


class Matrices(NamedTuple):
    """Shapes that are updated whole, each as rows, columns and how many there are, of `trained` elements."""

    shapes: Sequence[tuple[int, int, int]]
    trained: int

    @property
    def share(self) -> float:
        """The share of the trained elements that is in them."""
        return min(sum(rows * columns * count for rows, columns, count in self.shapes) / self.trained, 1.0)

    @property
    def flops(self) -> int:
        """The FLOPs of one update of all."""
        return sum(count * newton_schulz_flops(rows, columns) for rows, columns, count in self.shapes)

    @property
    def largest(self) -> int:
        """The elements of the largest, which nothing cuts."""
        return max((rows * columns for rows, columns, _ in self.shapes), default=0)

    def longest_shard(self, ranks: int) -> int:
        """The elements of the longest shard of rows of a matrix shared by `ranks`; nothing cuts a row."""
        return max((-(-rows // ranks) * columns for rows, columns, _ in self.shapes), default=0)

    @property
    def work_bytes(self) -> int:
        """The scratch that serves all, one after the other."""
        return max((muon_work_bytes(rows, columns) for rows, columns, _ in self.shapes), default=0)

    @property
    def moments(self) -> float:
        """The mean number of moments of an element, Muon's and AdamW's."""
        return self.share * MUON_MOMENTS + (1 - self.share) * ADAM_MOMENTS


def of_shape(shape: ModelShape, trained: int) -> Matrices:
    """Return those of a decoder as Hugging Face has them: projections apart, experts in stacks with gate and up."""
    listed: list[tuple[int, int, int]] = []
    for layer in range(shape.num_layers):
        listed += _attention(shape)
        listed += _experts(shape) if shape.is_moe(layer) else _mlp(shape, shape.ffn)
    kinds = dict.fromkeys((rows, columns) for rows, columns, _ in listed)
    counted = {kind: sum(count for *of, count in listed if tuple(of) == kind) for kind in kinds}
    return Matrices(tuple((*kind, count) for kind, count in counted.items()), trained)


def _attention(shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    hidden, heads = shape.hidden, shape.heads
    if not shape.uses_mla:
        head = shape.attention_head_dim
        yield heads * head, hidden, 1
        yield shape.kv_heads * head, hidden, 2
        yield hidden, heads * head, 1
        return
    queries = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    if shape.q_lora_rank:
        yield shape.q_lora_rank, hidden, 1
        yield queries, shape.q_lora_rank, 1
    else:
        yield queries, hidden, 1
    yield shape.kv_lora_rank + shape.qk_rope_head_dim, hidden, 1
    yield heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank, 1
    yield hidden, heads * shape.v_head_dim, 1


def _mlp(shape: ModelShape, inner: int) -> Iterator[tuple[int, int, int]]:
    yield inner, shape.hidden, 2 if shape.gated_mlp else 1
    yield shape.hidden, inner, 1


def _experts(shape: ModelShape) -> Iterator[tuple[int, int, int]]:
    joined = 2 if shape.gated_mlp else 1
    yield joined * shape.moe_ffn, shape.hidden, shape.experts
    yield shape.hidden, shape.moe_ffn, shape.experts
    yield shape.experts, shape.hidden, 1
    if shape.shared_ffn:
        yield from _mlp(shape, shape.shared_ffn)
