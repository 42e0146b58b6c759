# SPDX-License-Identifier: Apache-2.0
"""Peers' host bytes for each offloaded parameter, and the bytes that the rounding of their pinned blocks adds.

torch's host allocator makes pinned blocks of a power of two of bytes. Peers pin tensor by tensor, or in few flat
buffers, so a part of their pinned memory holds nothing: a third of it is usual, and nearly half is possible. The
buffers, and where each stands in its framework's source, are in `knowledge/host_buffers.yaml`. `reference_impl`
registers its pinned slabs itself, without rounding.

Explained in docs/choosing.md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from skill_tools import knowledge
from skill_tools.dialects.run import Mode, OptimizerEngine, TrainingRun
from skill_tools.dialects.shapes import ModelShape

_FSDP2 = "fsdp2"
ROUNDED = "torch rounds each up to a power of two"


def state_bytes(run: TrainingRun, mode: Mode) -> float:
    """Return the host bytes of an element that a peer updates on the CPU, its weight's and rounding apart."""
    buffers = _buffers(run, mode)
    return sum(_bytes(buffer, run) for buffer in buffers if buffer.get("when") != "parameters")


def pinned_bytes(run: TrainingRun, mode: Mode, elements: int) -> float:
    """Return the pinned bytes of `elements`."""
    buffers = (each for each in _buffers(run, mode) if each.get("when") != "parameters")
    return elements * sum(_bytes(buffer, run) for buffer in buffers if _is_pinned(buffer, mode))


def rounding_bytes(run: TrainingRun, mode: Mode, elements: int) -> int:
    """Return the bytes that rounding adds to the pinned blocks of `elements` of a rank."""
    return round(
        sum(
            _share_that_is_empty(run, buffer, elements, _bytes(buffer, run)) * elements * _bytes(buffer, run)
            for buffer in _buffers(run, mode)
            if _is_pinned(buffer, mode)
        )
    )


def rounding_of_tensors(run: TrainingRun, held_bytes: int) -> int:
    """Return the same for `held_bytes` that have a block for each weight's tensor, of 2 or 4 bytes an element."""
    return round(_share_by_tensor(run, 4) * held_bytes)


def rounded(size_bytes: int) -> int:
    """Return the bytes of a pinned block that holds `size_bytes`: the next power of two."""
    return 1 << max(size_bytes - 1, 0).bit_length()


def _engine(mode: Mode) -> Mapping[str, Any]:
    is_fsdp = mode.offload_parameters and mode.optimizer_engine is not OptimizerEngine.CPU_ADAM
    name = _FSDP2 if is_fsdp else str(mode.optimizer_engine)
    found: Mapping[str, Any] = knowledge.index()["host_buffers"][name]
    return found


def _buffers(run: TrainingRun, mode: Mode) -> Iterator[Mapping[str, Any]]:
    engine = _engine(mode)
    accumulates = run.micro_batches > 1 and run.weight_shards == 1 and not mode.offload_parameters
    happens = {"accumulates": accumulates, "parameters": mode.offload_parameters, None: True}
    for buffer in engine["buffers"]:
        is_frozen = mode.offload_parameters and run.adapter is not None and buffer["name"] != "weights"
        if happens[buffer.get("when")] and not is_frozen:
            yield {"group_elements": engine.get("group_elements"), **buffer}


def _bytes(buffer: Mapping[str, Any], run: TrainingRun) -> float:
    named = {"weight": _weight_bytes(run), "gradient": run.precision.gradient_bytes}
    found: float = named.get(buffer["bytes"], buffer["bytes"])
    return found


def _weight_bytes(run: TrainingRun) -> float:
    return run.precision.weight_bytes if run.adapter is None else run.adapter.base_weight_bytes


def _is_pinned(buffer: Mapping[str, Any], mode: Mode) -> bool:
    return mode.pins if buffer["pinned"] == "option" else bool(buffer["pinned"])


def _share_that_is_empty(
    run: TrainingRun, buffer: Mapping[str, Any], elements: int, bytes_each: float
) -> float:
    """Return the empty bytes of a buffer's blocks over the full ones."""
    if not elements:
        return 0.0
    if buffer["block"] == "tensor":
        return _share_by_tensor(run, bytes_each)
    most = min(elements, buffer["group_elements"]) if buffer["block"] == "group" else elements
    whole, rest = divmod(elements, most)
    blocks = whole * rounded(round(most * bytes_each)) + (rounded(round(rest * bytes_each)) if rest else 0)
    return blocks / (elements * bytes_each) - 1


@lru_cache(maxsize=256)
def _share_by_tensor(run: TrainingRun, bytes_each: float) -> float:
    """Return the same where each tensor, as a rank holds it, is a block of its own."""
    layout, empty, full = run.layout, 0.0, 0.0
    shared = (
        run.weight_shards if run.weight_shards > 1 else layout.dense_shards if run.shards_optimizer else 1
    )
    experts_shared = shared if run.is_eager else layout.expert_shards
    for is_expert, tensors in (
        (False, dense_tensors(run.shape, fused=not run.is_eager)),
        (True, expert_tensors(run.shape, fused=not run.is_eager)),
    ):
        ranks = experts_shared * layout.expert_tensor if is_expert else shared * layout.tensor
        here = 1 / layout.expert if is_expert else 1.0
        for numel, count in tensors.items():
            size = max(round(-(-numel // ranks) * bytes_each), 1)
            empty += here * count * (rounded(size) - size)
            full += here * count * size
    return empty / full


def dense_tensors(shape: ModelShape, *, fused: bool) -> Counter[int]:
    """Return the elements of a decoder's tensors outside of its experts, each size with how often it occurs.

    `fused` says that queries, keys and values are one tensor, and so are an MLP's gate and up.
    """
    found = Counter({shape.vocab * shape.hidden: 1 if shape.tied_embeddings else 2})
    found[shape.hidden] += shape.norms_per_layer * shape.num_layers + 1
    for layer in range(shape.num_layers):
        found.update(_attention(shape, fused=fused))
        if shape.is_moe(layer):
            found[shape.hidden * shape.experts] += 1
            found.update(_mlp(shape, shape.shared_ffn, fused=fused) if shape.shared_ffn else ())
        else:
            found.update(_mlp(shape, shape.ffn, fused=fused))
    return found


def expert_tensors(shape: ModelShape, *, fused: bool) -> Counter[int]:
    """Return the same of the experts: `fused` has a tensor for each expert, eager code one for all of a layer."""
    layers = sum(1 for layer in range(shape.num_layers) if shape.is_moe(layer))
    if not layers:
        return Counter()
    up, down = _expert(shape)
    each, count = (1, shape.experts * layers) if fused else (shape.experts, layers)
    return Counter([each * up] * count + [each * down] * count)


def _expert(shape: ModelShape) -> tuple[int, int]:
    down = shape.hidden * shape.moe_ffn
    return (2 if shape.gated_mlp else 1) * down, down


def layer_tensors(shape: ModelShape) -> list[int]:
    """Return the elements of the matrices of a decoder's last layer, as eager code has them."""
    has_experts = shape.is_moe(shape.num_layers - 1)
    experts = [shape.experts * each for each in _expert(shape)] if has_experts else []
    inner = shape.shared_ffn if has_experts else shape.ffn
    return [*_attention(shape, fused=False), *experts, *(_mlp(shape, inner, fused=False) if inner else ())]


def _attention(shape: ModelShape, *, fused: bool) -> list[int]:
    hidden, heads = shape.hidden, shape.heads
    if shape.uses_mla:
        query = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        low = shape.q_lora_rank
        return [
            *([hidden * low, low * query] if low else [hidden * query]),
            hidden * (shape.kv_lora_rank + shape.qk_rope_head_dim),
            shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim),
            heads * shape.v_head_dim * hidden,
        ]
    queries, keys = heads * shape.attention_head_dim, shape.kv_heads * shape.attention_head_dim
    if fused:
        return [hidden * (queries + 2 * keys), queries * hidden]
    return [hidden * queries, hidden * keys, hidden * keys, queries * hidden]


def _mlp(shape: ModelShape, inner: int, *, fused: bool) -> list[int]:
    one = shape.hidden * inner
    if not shape.gated_mlp:
        return [one, one]
    return [2 * one, one] if fused else [one, one, one]
