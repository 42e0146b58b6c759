"""Bytes that autograd keeps per token for one decoder layer, part by part.

Each part is tagged with what removes it: the recompute module that drops it and the fine-grained offload
module that moves it. Counted are unique storages with flash attention (no score matrix), bf16 unless said.
The list is the one of a Llama layer: inputs of norms and linears, q, k, v, attention output, and what the
MLP or the experts keep.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from skill_tools.dialects.run import Run
from skill_tools.dialects.shapes import ModelShape

IMBALANCE = 1.0  # tokens an expert rank receives, relative to an even spread

_COMPONENTS = (
    *((start, "attention") for start in ("MLA", "query", "attention output", "attention log")),
    *((start, "MLP") for start in ("MLP first", "MLP activation")),
    *((start, "experts") for start in ("router", "dispatched", "expert", "shared expert")),
)


class Part(NamedTuple):
    """One kept tensor: its bytes a token, and the modules whose recompute drops or whose offload moves it."""

    name: str
    token_bytes: float
    dropped_by: tuple[str, ...] = ()
    moved_by: str = ""


def layer_parts(run: Run, *, moe: bool) -> tuple[Part, ...]:
    """List what one layer keeps for backward, per token of the micro-batch, on one GPU."""
    shape, layout = run.shape, run.layout
    whole = 2 * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
    parts = [
        Part("layer input", whole, (), "attn_norm"),
        Part("attention norm output", whole + run.norm_bytes * shape.hidden, ("layernorm",), "qkv_linear"),
        *_attention_parts(shape, layout.tensor),
        Part("MLP norm input", whole, (), "mlp_norm"),
        Part("MLP norm output", whole + run.norm_bytes * shape.hidden, ("layernorm",)),
    ]
    parts.extend(_expert_parts(run) if moe else _mlp_parts(run, shape.ffn, ("mlp",)))
    return tuple(parts)


def _attention_parts(shape: ModelShape, tensor: int) -> Iterable[Part]:
    if shape.uses_mla:
        query = shape.heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        value = shape.heads * shape.v_head_dim
        latent = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim
        yield Part("MLA latents", 2 * latent)
        yield Part("query, key, value", 2 * (2 * query + value) / tensor, ("mla_up_proj",), "core_attn")
    else:
        head = shape.attention_head_dim
        value = shape.heads * head
        keys = 2 * shape.kv_heads * head
        yield Part("query, key, value", 2 * (value + keys) / tensor, (), "core_attn")
    yield Part("attention output", 2 * value / tensor, (), "attn_proj")
    yield Part("attention log-sum-exp and norm scales", 4 * shape.heads / tensor + 8)


def _mlp_parts(run: Run, inner: int, dropped_by: tuple[str, ...], name: str = "MLP") -> Iterable[Part]:
    columns = (2 if run.shape.gated_mlp else 1) * inner
    extra = 0 if run.fused_activation or not run.shape.gated_mlp else inner
    yield Part(f"{name} first linear output", 2 * columns / run.layout.tensor, dropped_by)
    yield Part(f"{name} activation output", 2 * (inner + extra) / run.layout.tensor, dropped_by)


def _expert_parts(run: Run) -> Iterable[Part]:
    shape = run.shape
    routed = shape.experts_per_token * IMBALANCE / run.layout.tensor
    columns = (2 if shape.gated_mlp else 1) * shape.moe_ffn
    yield Part("router scores", 8 * shape.experts / run.layout.tensor, ("moe",))
    yield Part(
        "dispatched tokens", 2 * shape.hidden * routed * run.layout.expert_tensor, ("moe",), "expert_fc1"
    )
    yield Part("expert first linear output", 2 * columns * routed, ("moe",), "moe_act")
    yield Part("expert activation output", 2 * shape.moe_ffn * routed, ("moe", "moe_act"))
    yield Part("expert output before combine", 2 * shape.hidden * routed, ("moe",))
    if shape.shared_ffn:
        yield from _mlp_parts(run, shape.shared_ffn, ("moe", "shared_experts"), "shared expert")


@lru_cache(maxsize=1024)
def kept(parts: tuple[Part, ...], recomputed: tuple[str, ...], moved: tuple[str, ...]) -> tuple[float, float]:
    """Return (bytes that stay on the GPU, bytes that leave for the host) per token and layer."""
    stays = leaves = 0.0
    for part in parts:
        if set(part.dropped_by) & set(recomputed):
            continue
        if part.moved_by and part.moved_by in moved:
            leaves += part.token_bytes
        else:
            stays += part.token_bytes
    return stays, leaves


def by_component(
    parts: Iterable[Part], recomputed: tuple[str, ...], moved: tuple[str, ...]
) -> dict[str, float]:
    """Return the bytes per token and layer that stay on the GPU, by what they belong to."""
    found: dict[str, float] = {}
    for part in parts:
        stays, _ = kept((part,), recomputed, moved)
        if stays:
            name = next(
                (name for start, name in _COMPONENTS if part.name.startswith(start)), "inputs and norms"
            )
            found[name] = found.get(name, 0.0) + stays
    return found


def in_flight(run: Run, stage_rank: int) -> float:
    """Return the micro-batches whose activations one pipeline rank holds at its worst moment.

    1F1B keeps `PP - rank`; the interleaved schedule `((V - 1) PP + 2 (PP - rank - 1) + 1) / V` of its chunks.
    """
    stages, chunks = run.layout.pipeline, run.layout.virtual_stages
    if stages == 1:
        return 1
    if chunks == 1:
        return min(stages - stage_rank, run.micro_batches)
    held = (chunks - 1) * stages + 2 * (stages - stage_rank - 1) + 1
    return min(held, chunks * run.micro_batches) / chunks
