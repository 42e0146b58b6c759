# SPDX-License-Identifier: Apache-2.0
"""Bytes that autograd keeps for backward: per token of one decoder layer, and of a pipeline stage under a mode.

A layer is a list of parts: inputs of norms and linears, q, k, v, the attention output, and the tensors of the MLP or
the experts keep. Each part names its recompute module and its fine-grained offload module.
The list counts unique storages with flash attention (no score matrix), in bf16 unless it says otherwise.

A stage walks its layers with the mode's recompute and engine. An engine needs memory of its own: offloaded layers are
copied one layer late, checkpointed inputs are double-buffered, and TRL keeps two copies of its saved tensors. Explained
in docs/activation-offloading.md.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from offload_arithmetic.sizes import ACTIVATIONS_IN_FLIGHT_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.layout import Stage, stages
from skill_tools.dialects.run import ActivationEngine, Mode, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.model import tiles
from skill_tools.units import GIB

LOSS_CHUNK_TOKENS = 512
IMBALANCE = 1.0  # tokens an expert rank receives, relative to an even spread

_COMPONENTS = (
    *((start, "attention") for start in ("MLA", "query", "attention output", "attention log")),
    *((start, "MLP") for start in ("MLP first", "MLP activation")),
    *((start, "experts") for start in ("router", "dispatched", "expert", "shared expert")),
)

_KEPT_OF_ATTENTION = ("attention output", "attention log-sum-exp and norm scales")


class Part(NamedTuple):
    """One kept tensor: its bytes a token, and the modules that recompute or offload it."""

    name: str
    token_bytes: float
    dropped_by: tuple[str, ...] = ()
    moved_by: str = ""


def layer_parts(run: TrainingRun, *, moe: bool) -> tuple[Part, ...]:
    """List the tensors that one layer keeps for backward, per token of the micro-batch, on one GPU.

    Where the model was traced, the parts add up to the layers' mean in the trace.
    """
    parts = _parts_by_formula(run, moe=moe)
    if run.traced is None:
        return parts
    layers = run.traced.plain.layers
    traced = sum(layer.at(run.micro_batch, run.seq_length) for layer in layers) / len(layers) / run.tokens
    scale = traced / sum(part.token_bytes for part in parts)
    return tuple(part._replace(token_bytes=part.token_bytes * scale) for part in parts)


def _parts_by_formula(run: TrainingRun, *, moe: bool) -> tuple[Part, ...]:
    """Return a layer's parts. Megatron's layers fuse a norm into the linear layer after it, so that it is no module of
    its own: all but the attention norm of multi-latent attention and the MLP norm before experts.
    """
    shape, layout = run.shape, run.layout
    attention_norm = "layernorm" if shape.uses_mla or run.norm_bytes else ""
    mlp_norm = "layernorm" if moe or run.norm_bytes else ""
    whole = 2 * shape.hidden / (layout.tensor if layout.sequence_parallel else 1)
    parts = [
        Part("layer input", whole, (), "attn_norm" if attention_norm else ""),
        Part("attention norm output", whole + run.norm_bytes * shape.hidden, (attention_norm,), "qkv_linear"),
        *_attention_parts(shape, layout.tensor),
        *_query_key_norm(run),
        *_scores(run),
        Part("MLP norm input", whole, (), "mlp_norm" if mlp_norm else ""),
        Part("MLP norm output", whole + run.norm_bytes * shape.hidden, (mlp_norm,)),
    ]
    if run.norm_bytes:
        further = (shape.norms_per_layer - 2) * (2 * whole + run.norm_bytes * shape.hidden)
        parts.extend([Part("further norm output", further, ("layernorm",))] if further else [])
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


def _query_key_norm(run: TrainingRun) -> Iterable[Part]:
    """Eager norms of query and key: an fp32 copy, the normalised result in bf16, and a scale a head."""
    if run.shape.qk_norm and run.norm_bytes:
        heads = run.shape.heads + run.shape.kv_heads
        bytes_each = (2 + run.norm_bytes) * run.shape.attention_head_dim + 4
        yield Part("query and key norm output", heads * bytes_each / run.layout.tensor, ("layernorm",))


def _scores(run: TrainingRun) -> Iterable[Part]:
    """Probabilities in bf16, where a model with attention sinks has no fused kernel in Hugging Face's code."""
    if run.shape.attention_sinks and run.norm_bytes:
        yield Part("attention probabilities", 2 * run.shape.heads * run.seq_length)


def _mlp_parts(
    run: TrainingRun, inner: int, dropped_by: tuple[str, ...], name: str = "MLP"
) -> Iterable[Part]:
    columns = (2 if run.shape.gated_mlp else 1) * inner
    extra = 0 if run.fused_activation or not run.shape.gated_mlp else inner
    yield Part(f"{name} first linear output", 2 * columns / run.layout.tensor, dropped_by)
    yield Part(f"{name} activation output", 2 * (inner + extra) / run.layout.tensor, dropped_by)


def _expert_parts(run: TrainingRun) -> Iterable[Part]:
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
def stays_and_moves(
    parts: tuple[Part, ...], recomputed: tuple[str, ...], moved: tuple[str, ...]
) -> tuple[float, float]:
    """Return (bytes on the GPU, bytes moved to the host) per token and layer."""
    stays = moves = 0.0
    for part in parts:
        if set(part.dropped_by) & set(recomputed):
            continue
        if part.moved_by and part.moved_by in moved:
            moves += part.token_bytes
        else:
            stays += part.token_bytes
    return stays, moves


def by_component(
    parts: Iterable[Part], recomputed: tuple[str, ...], moved: tuple[str, ...]
) -> dict[str, float]:
    """Return the bytes per token and layer that stay on the GPU, by part of the layer."""
    found: dict[str, float] = {}
    for part in parts:
        stays, _ = stays_and_moves((part,), recomputed, moved)
        if stays:
            name = next(
                (name for start, name in _COMPONENTS if part.name.startswith(start)), "inputs and norms"
            )
            found[name] = found.get(name, 0.0) + stays
    return found


def in_flight(run: TrainingRun, stage_rank: int) -> float:
    """Return the micro-batches whose activations one pipeline rank holds at its worst moment.

    1F1B keeps `PP - rank`; the interleaved schedule `((V - 1) PP + 2 (PP - rank - 1) + 1) / V` of its chunks.
    """
    depth, chunks = run.layout.pipeline, run.layout.virtual_stages
    if depth == 1:
        return 1
    if chunks == 1:
        return min(depth - stage_rank, run.micro_batches)
    held = (chunks - 1) * depth + 2 * (depth - stage_rank - 1) + 1
    return min(held, chunks * run.micro_batches) / chunks


class Kept(NamedTuple):
    """Bytes of one micro-batch on one GPU.

    `stays` are the GPU's bytes after forward, `offloaded` the host's. `copied` is `offloaded` and the
    duplicates that an engine copies again. `layer` are the bytes that backward needs of one layer at once, alive at
    `layer_when`; `forward` are those that forward needs of one layer, where layers are computed again. Of a token,
    `final_token_bytes` are the final norm's tensors; of a logit, `logits_bytes` wait for their copy. `components` names
    the tensors that the largest layer keeps on the GPU. Of `stays`, `waiting` is there only until it is copied. Beside
    it `early_input` is an offloaded layer input that has come before its use.
    """

    stays: float
    offloaded: float
    copied: float
    layer: float
    layer_when: str
    forward: float
    final_token_bytes: float
    logits_bytes: float
    components: str = ""
    waiting: float = 0.0
    early_input: float = 0.0


def kept_by_stage(run: TrainingRun, mode: Mode, stage: Stage) -> Kept:
    """Return the bytes that the stage's layers keep under `mode`.

    Layers through which no gradient goes keep nothing. Checkpointing has their inputs require gradients, so that they
    keep those.
    """
    recompute = mode.recompute or run.recompute
    without = 0 if recompute.granularity == "full" else run.layers_without_gradients
    prediction = (run.shape.num_layers - 1,) * (run.shape.mtp_layers if stage.has_head else 0)
    indices = (*stage.layers, *prediction)
    kinds = {run.shape.is_moe(index) for index in indices if index >= without}
    parts = {moe: layer_parts(run, moe=moe) for moe in kinds}
    largest = max((_needed_at_once(run, layer) for layer in parts.values()), default=0.0)
    stays = offloaded = copied = 0.0
    for position, index in enumerate(indices):
        if index < without:
            continue
        stay, moved, twice = _layer(run, mode, recompute, parts[run.shape.is_moe(index)], position)
        stays, offloaded, copied = stays + stay, offloaded + moved, copied + moved + twice
    waiting = _waiting(run, mode, largest, offloaded)
    stays += waiting
    tokens = run.tokens
    engine = mode.activation_engine
    everything = engine in {
        ActivationEngine.ON_DEMAND,
        ActivationEngine.SAVE_ON_CPU,
        ActivationEngine.OWN_INPUTS,
    }
    again = recompute.granularity == "full" or (everything and not mode.layers) or bool(mode.removed)
    inner = max((_inner_gradients(run, mode, layer, moe=moe) for moe, layer in parts.items()), default=0.0)
    if mode.activation_engine is ActivationEngine.SAVE_ON_CPU:
        largest, inner = max((_one_module(layer) for layer in parts.values()), default=0.0), 0.0
    return Kept(
        stays=stays * tokens,
        offloaded=offloaded * tokens,
        copied=copied * tokens,
        layer=min(in_slices(run, mode, largest * tokens) + inner, needed_in_tiles(run, mode)),
        layer_when="recompute" if again else "backward",
        forward=_in_forward(run, mode, parts.values()) if recompute.granularity == "full" else 0.0,
        final_token_bytes=0.0 if everything and not mode.layers else 2 * input_bytes(run),
        logits_bytes=2.0 if mode.activation_engine is ActivationEngine.ON_DEMAND else 0.0,
        components=_components(run, mode, recompute, tuple(parts.values())),
        waiting=waiting * tokens,
        early_input=_early_input(run, mode, offloaded) * tokens,
    )


def needed_in_tiles(run: TrainingRun, mode: Mode) -> float:
    """Return the bytes that a layer's backward needs at once in tiles, of several kinds the most; infinite without."""
    if not tiles.are_used(run, mode):
        return math.inf
    tokens = _share_of_slice(run, mode) * run.tokens
    kinds = {run.shape.is_moe(index) for index in range(run.shape.num_layers)}
    needed = []
    for moe in kinds:
        parts = layer_parts(run, moe=moe)
        sizes: dict[str, float] = {}
        for part in parts:
            sizes[part.name] = sizes.get(part.name, 0.0) + part.token_bytes
        inner = _inner_gradients(run, mode, parts, moe=moe)
        needed.append(tiles.needed_bytes(run, mode, sizes, tokens, inner, moe=moe))
    return max(needed) + _around_slice(run, mode)


def in_slices(run: TrainingRun, mode: Mode, work: float) -> float:
    """Return the bytes that a layer's backward needs at once, with slices; `work` is that of a whole micro-batch.

    The gradients of the whole input and output are there beside a slice's work.
    """
    return _share_of_slice(run, mode) * work + _around_slice(run, mode)


def _around_slice(run: TrainingRun, mode: Mode) -> float:
    return 2 * (1 - _share_of_slice(run, mode)) * input_bytes(run) * run.tokens


def _share_of_slice(run: TrainingRun, mode: Mode) -> float:
    return math.ceil(run.micro_batch / mode.slices) / run.micro_batch


def _needed_at_once(run: TrainingRun, parts: tuple[Part, ...]) -> float:
    """Bytes a token that backward needs of one layer at once."""
    return sum(part.token_bytes for part in parts if not (run.tiled_mlp and "MLP" in part.name))


def _in_forward(run: TrainingRun, mode: Mode, kinds: Iterable[tuple[Part, ...]]) -> float:
    """Return the bytes that forward needs of one layer that saves nothing: in its attention, or in its MLP or experts.

    Beside them are the layer's input and the norm's output. An MLP has the results of its first linear layers, of a
    gated one the activated one, and their product.
    """
    shape = run.shape
    attention = max(
        sum(part.token_bytes for part in layer if part.name in {"query, key, value", "attention output"})
        for layer in kinds
    )
    share = mode.tile_tokens / run.seq_length if tiles.are_used(run, mode) else 1.0
    inner = max(shape.ffn, shape.experts_per_token * shape.moe_ffn + shape.shared_ffn) / run.layout.tensor
    mlp = share * 2 * (3 if shape.gated_mlp else 2) * inner
    return in_slices(run, mode, (2 * input_bytes(run) + max(attention, mlp)) * run.tokens)


def _inner_gradients(run: TrainingRun, mode: Mode, parts: tuple[Part, ...], *, moe: bool) -> float:
    """Bytes of gradients in the backward of an eager MLP, beside its layer's saved tensors.

    At the activation function these are as many as its results: their own gradient replaces one. The gradients of the
    layer's weights come later: only the bytes beyond them count.
    """
    if not run.is_eager or run.tiled_mlp:
        return 0.0
    inner = sum(part.token_bytes for part in parts if part.name.endswith("activation output"))
    made = 0 if run.adapter else run.precision.gradient_bytes * parameters.layer(run.shape, moe=moe).total
    return max(_share_of_slice(run, mode) * inner * run.tokens - made, 0.0)


def _components(
    run: TrainingRun, mode: Mode, recompute: Recompute, kinds: tuple[tuple[Part, ...], ...]
) -> str:
    """Name the kept tensors of one layer: of several kinds, of the largest."""
    if recompute.granularity == "full" or not kinds:
        return f"layer inputs {input_bytes(run) * run.tokens / GIB:.2f}"
    dropped = recompute.modules if recompute.granularity == "selective" else ()
    largest = max(kinds, key=lambda parts: sum(part.token_bytes for part in parts))
    found = by_component(largest, dropped, mode.modules)
    return ", ".join(f"{name} {size * run.tokens / GIB:.2f}" for name, size in found.items())


def _layer(
    run: TrainingRun, mode: Mode, recompute: Recompute, parts: tuple[Part, ...], position: int
) -> tuple[float, float, float]:
    """Return the bytes a token that stay, the moved bytes, and the second copies of moved bytes."""
    dropped = recompute.modules if recompute.granularity == "selective" else ()
    stay, moved = stays_and_moves(parts, dropped, mode.modules)
    if recompute.granularity == "full" and (recompute.method == "uniform" or position < recompute.layers):
        first = recompute.method == "block" or position % max(recompute.layers, 1) == 0
        stay, moved = (input_bytes(run) if first else 0.0), 0.0
    match mode.activation_engine:
        case ActivationEngine.LAYERS | ActivationEngine.OWN_LAYERS:
            return (0.0, stay, 0.0) if position < mode.layers else (stay, moved, 0.0)
        case ActivationEngine.INPUTS | ActivationEngine.OWN_INPUTS:
            return 0.0, stay + (attention_bytes(parts) if position < mode.attention_layers else 0.0), 0.0
        case ActivationEngine.OWN_BUDGET:
            return stay * (1 - mode.removed), stay * (mode.removed - mode.recomputed), 0.0
        case ActivationEngine.SAVE_ON_CPU:
            return (0.0, stay, _saved_twice(parts)) if _covers(mode, position) else (stay, moved, 0.0)
        case ActivationEngine.ON_DEMAND:
            twice = _saved_twice(parts) if recompute.granularity != "full" else 0.0
            return twice, stay - twice, twice
    return stay, moved, 0.0


def dropped_bytes(run: TrainingRun, recompute: Recompute, stage_rank: int) -> float:
    """Return the bytes that selective recompute writes again in one micro-batch on one GPU."""
    stage = stages(run.shape, run.layout)[stage_rank]
    total = 0.0
    for moe in {run.shape.is_moe(index) for index in stage.layers}:
        count = sum(1 for index in stage.layers if run.shape.is_moe(index) is moe)
        parts = layer_parts(run, moe=moe)
        total += count * sum(
            part.token_bytes for part in parts if set(part.dropped_by) & set(recompute.modules)
        )
    return total * run.tokens


def _covers(mode: Mode, position: int) -> bool:
    return not mode.layers or position < mode.layers


def _saved_twice(parts: tuple[Part, ...]) -> float:
    """Bytes that two linears save each: the MLP's input, for the gate and the up projection."""
    return sum(part.token_bytes for part in parts if part.name == "MLP norm output")


def _one_module(parts: tuple[Part, ...]) -> float:
    """Bytes of the MLP's inner tensors, which on-demand loading brings back at once."""
    return sum(
        part.token_bytes for part in parts if part.name.endswith(("linear output", "activation output"))
    )


def _waiting(run: TrainingRun, mode: Mode, largest: float, offloaded: float) -> float:
    """Bytes a token that wait on the GPU for their copy."""
    match mode.activation_engine:
        case ActivationEngine.LAYERS:
            return largest if mode.layers else 0.0
        case ActivationEngine.INPUTS:
            return 2 * input_bytes(run)
        case ActivationEngine.OWN_LAYERS:
            return min(ACTIVATIONS_IN_FLIGHT_BYTES / run.tokens, offloaded)
    return 0.0


def _early_input(run: TrainingRun, mode: Mode, offloaded: float) -> float:
    """Bytes a token of the offloaded layer input that comes back before its use, however large it is."""
    if mode.activation_engine is not ActivationEngine.OWN_INPUTS:
        return 0.0
    return min(input_bytes(run), offloaded)


def attention_bytes(parts: tuple[Part, ...]) -> float:
    """Bytes a token of one layer's attention output, and of the logarithms that its backward reads."""
    return sum(part.token_bytes for part in parts if part.name in _KEPT_OF_ATTENTION)


def input_bytes(run: TrainingRun) -> float:
    """Bytes a token of one layer's input."""
    return 2 * run.shape.hidden / (run.layout.tensor if run.layout.sequence_parallel else 1)


def loss_bytes(run: TrainingRun, whole: float) -> float:
    """Return the bytes of head and loss at the start of backward, which are `whole` bytes with all logits at once.

    A fused loss adds the head's gradient up in one fp32 tensor, and has the logits of one chunk at a time.
    """
    if not run.fused_loss:
        return whole
    vocab = run.shape.vocab / run.layout.tensor
    chunk = run.loss_bytes * vocab * min(LOSS_CHUNK_TOKENS, run.tokens)
    return min(whole, chunk + (4 * vocab + 2 * run.tokens) * run.shape.hidden)
