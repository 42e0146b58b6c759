# SPDX-License-Identifier: Apache-2.0
"""Which part of a model `unfrozen_parameters` leaves to be trained.

Its entries are regular expressions for the beginning of a parameter's name in the Hugging Face model. A dot is a dot,
unless a plus follows. A range of rows at the end changes no memory: gradients and states are those of the whole tensor.
Names of mixtures of experts differ from model to model, so a layer's experts go by several.

The entries are somebody's input: a slow one, or one that is no expression, is not evaluated.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.dialects import parameters
from skill_tools.dialects.assumptions import Assumption
from skill_tools.dialects.shapes import ModelShape

_ROWS = re.compile(r"(.+)\[[0-9]*(?::[0-9]*)?\]")
# A repeated group may take for ever; names need none.
_PLAIN = re.compile(r"[A-Za-z0-9_.^$\[\]\-+*\\?|]{1,200}")
_MOST_REPEATS = 4
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MIXTURES = ("mlp", "block_sparse_moe", "feed_forward")


class Trained(NamedTuple):
    """The `share` of a model's elements that is trained, and its first `layers_without` layers, before all of it.

    Through those no gradient goes, so autograd saves nothing of them.
    """

    share: float = 1.0
    layers_without: int = 0


def trained(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Trained:
    """Return the trained parameters: all, where the setting is absent or says nothing."""
    written = config.value("unfrozen_parameters")
    if not written or config.value("adapter"):
        return Trained()
    wanted = [str(each) for each in written] if isinstance(written, list) else [str(written)]
    patterns = [_pattern(each) for each in wanted]
    known = [each for each in patterns if each is not None]
    matched = [
        (names[0], size)
        for names, size in tensors(shape)
        if any(pattern.match(name) for pattern in known for name in names)
    ]
    if len(known) < len(wanted) or not matched:
        assumptions.append(
            Assumption("unfrozen_parameters is not understood: every weight is counted as trained")
        )
        return Trained()
    share = min(sum(size for _, size in matched) / parameters.model(shape).total, 1.0)
    without = min(_layers_before(name, shape) for name, _ in matched)
    said = f"; the {without} layers before them save nothing, unless they are checkpointed" if without else ""
    assumptions.append(
        Assumption(f"unfrozen_parameters leaves {share:.0%} of the weights to be trained{said}")
    )
    return Trained(share, without)


def _layers_before(name: str, shape: ModelShape) -> int:
    """Return how many layers run before the parameter called `name`; a tied table is at both ends."""
    layer = _LAYER.match(name)
    if layer:
        return int(layer.group(1))
    return 0 if name.startswith("model.embed_tokens") else shape.num_layers


def tensors(shape: ModelShape) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield a decoder's tensors, or groups with one prefix: the possible names of each, and its elements."""
    table = shape.vocab * shape.hidden
    yield ("model.embed_tokens.weight",), table
    if not shape.tied_embeddings:
        yield ("lm_head.weight",), table
    yield ("model.norm.weight",), parameters.norm(shape)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield (f"{layer}.{norm}.weight",), parameters.norm(shape)
        yield from _attention(shape, f"{layer}.self_attn")
        if not shape.is_moe(index):
            for name in (
                ("gate_proj", "up_proj", "down_proj") if shape.gated_mlp else ("up_proj", "down_proj")
            ):
                yield (f"{layer}.mlp.{name}.weight",), shape.hidden * shape.ffn
            continue
        experts = shape.experts * parameters.mlp(shape, shape.moe_ffn)
        yield tuple(f"{layer}.{each}.gate.weight" for each in _MIXTURES), shape.hidden * shape.experts
        yield tuple(f"{layer}.{each}.experts.0.weight" for each in _MIXTURES), experts
        if shape.shared_ffn:
            shared = parameters.mlp(shape, shape.shared_ffn)
            yield tuple(f"{layer}.{each}.shared_expert.weight" for each in _MIXTURES), shared


def _attention(shape: ModelShape, name: str) -> Iterator[tuple[tuple[str, ...], int]]:
    if shape.uses_mla:
        yield (f"{name}.q_proj.weight", f"{name}.kv_b_proj.weight"), parameters.attention(shape).total
        return
    queries, keys = shape.heads * shape.attention_head_dim, shape.kv_heads * shape.attention_head_dim
    for part, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys), ("o_proj", queries)):
        yield (f"{name}.{part}.weight",), shape.hidden * rows


def _pattern(text: str) -> re.Pattern[str] | None:
    """Return an entry as an expression, or None if it cannot be evaluated safely."""
    rows = _ROWS.fullmatch(text)
    # A class of characters at the end looks like rows only if it has nothing but digits and a colon.
    plain = rows.group(1) if rows else text
    if not _PLAIN.fullmatch(plain) or plain.count("+") + plain.count("*") > _MOST_REPEATS:
        return None
    try:
        return re.compile(re.sub(r"\.(?!\+)", r"\\.", plain))
    except re.error:
        return None
