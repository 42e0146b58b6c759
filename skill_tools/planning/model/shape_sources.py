# SPDX-License-Identifier: Apache-2.0
"""Finds the shape of the model to plan for: the configuration's own fields, a config.json, or a known name.

Own fields win where a configuration has all of them; a name fills the rest, and fields set beside a name
change it (`num_layers: 16` on a known model is that model with 16 layers). A name is a folder with a config.json, a
known model, or one in Hugging Face's cache, in this order. Nothing is guessed from a file's name, but it may be
suggested.
"""

import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from skill_tools.configs.config import Config
from skill_tools.configs.files import read_bytes
from skill_tools.dialects import fields, registry
from skill_tools.dialects.shapes import ModelShape, checked
from skill_tools.errors import UnusableInput
from skill_tools.planning.model import known_models, local_models
from skill_tools.started import COMMAND

_WORD = re.compile(r"[A-Za-z][\w./-]{5,}\d[\w./-]*")  # long enough for a model's name, with a digit in it
_SIZE = re.compile(r"(?<![A-Za-z0-9])\d+(?:\.\d+)?[bB](?![A-Za-z0-9])")  # of a model's name: 30b, 1.5B
_JSON_BYTES = 4 << 20
_TEXT_ALONE = f", the shape of its text decoder; {COMMAND} trace counts the whole model"
_HYBRID = ("linear_num_key_heads", "mamba_num_heads", "ssm_state_size", "state_size", "layer_types_linear")
# Queries, keys and values by one linear layer, in Transformers 5.23.
_FUSED_QKV = frozenset(
    {
        "bloom",
        "codegen",
        "dbrx",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "minimax",
        "mpt",
        "persimmon",
        "phi3",
    }
)
_FOUR_NORMS = {"glm4", "glm4v", "glm4v_text"}
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


class UnknownShapeError(UnusableInput):
    """A configuration was read, but neither its fields nor its names say which model it trains."""


def shape_of(config: Config | None, *, model: str | None, config_json: str | None) -> tuple[ModelShape, str]:
    """Return the shape and, in words, where it came from; raise `UnusableInput` when nothing says it."""
    if config_json is not None:
        shape, note = from_config_json(config_json)
        return _changed(shape, config), f"{config_json}{note}"
    if model is not None:
        found = _named(model, config)
        if found is None:
            raise known_models.unknown(model)
        return _changed(found[0], config), found[1]
    if config is None:
        raise UnusableInput(
            "no model is named",
            expected="a model's shape",
            attempt="--model llama-3-8b, or a config.json file",
        )
    if own := from_fields(config):
        return own, "the configuration's own fields"
    if config.model_name and (found := _named(config.model_name, config)):
        return _changed(found[0], config), f"{found[1]}, named by {config.model_name!r}"
    if not _is_models_name(config.model_name) and (only := _only_model_named(config)):
        return _changed(
            known_models.shape(only), config
        ), f"known model {only}, the only one that the input names"
    raise _unknown(config)


def _named(name: str, config: Config | None) -> tuple[ModelShape, str] | None:
    """Return the shape of `name` here, and its source: a folder, a known model, or a cached one."""
    beside = [str(PurePath(source).parent) for source in config.sources] if config else []
    path = local_models.config_json(name, beside)
    known = known_models.find(name)
    if known is not None and (path is None or path == local_models.cached(name)):
        return known_models.shape(known), f"known model {known}"
    if path is None:
        return None
    shape, note = from_config_json(path)
    return shape, f"{path}{note}"


def _is_models_name(name: str | None) -> bool:
    """Return whether `name` is a model's; a recipe's function without a number in its name says nothing."""
    return bool(name) and re.search(r"[/\d]", name or "") is not None


def _only_model_named(config: Config) -> str | None:
    """Return the known model that the input's text names outside of comments, if it names exactly one.

    Beside a name of another size it may be an encoder, a teacher or a processor.
    """
    lines = (line.split("#")[0] for text in config.sources.values() for line in text.splitlines())
    words = {word for line in lines for word in _WORD.findall(line)}
    known = {word: name for word in words if (name := known_models.find(word)) is not None}
    others = [word for word in words if known_models.similar(word) is None]
    is_it = len(set(known.values())) == 1 and _sizes(others) <= _sizes(known)
    return next(iter(known.values())) if is_it else None


def _sizes(words: Iterable[str]) -> set[str]:
    return {size.lower() for word in words for size in _SIZE.findall(word)}


def _unknown(config: Config) -> UnusableInput:
    dialect = registry.named(config.framework)
    if dialect.no_plan:  # no model that is named would give one
        return dialect.not_planned()
    sizes = {
        "num_layers": fields.integer(config, "num_layers"),
        "hidden_size": fields.integer(config, "hidden_size"),
        "num_attention_heads": fields.integer(config, "num_attention_heads"),
        "vocab_size": _vocabulary(config),
    }
    missing = [name for name, size in sizes.items() if size is None]
    if len(missing) < len(sizes):
        return UnknownShapeError(
            f"the configuration sets some of the model's sizes, but not {', '.join(missing)}",
            expected="all of them, a known model or a config.json",
            attempt=f"{dialect.size_override(missing[0])}, or --model NAME",
        )
    if config.model_name:
        error = known_models.unknown(config.model_name)
        return UnknownShapeError(error.problem, expected=error.expected, attempt=error.attempt)
    hints = [known_models.find(PurePath(name).stem) for name in config.sources]
    hint = next((name for name in hints if name), None)
    return UnknownShapeError(
        "the configuration names no model",
        expected=f"a known model, a config.json, or {', '.join(sizes)}",
        attempt=f"--model {hint} (the file's name suggests it)"
        if hint
        else "--model NAME, for example --model qwen3-30b-a3b",
    )


def from_fields(config: Config) -> ModelShape | None:
    """Build the shape from Megatron's own fields, or None when they are not all there."""
    num_layers, hidden = fields.integer(config, "num_layers"), fields.integer(config, "hidden_size")
    heads, vocab = fields.integer(config, "num_attention_heads"), _vocabulary(config)
    if num_layers is None or hidden is None or heads is None or vocab is None:
        return None
    gated = fields.flag(config, "gated_linear_unit", "swiglu") or False
    base = ModelShape(
        name=config.model_name or "this configuration",
        num_layers=num_layers,
        hidden=hidden,
        ffn=fields.integer(config, "ffn_hidden_size") or 4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        gated_mlp=gated,
        tied_embeddings=_tied(config),
        linear_bias=_biased(config),
        norm_bias=(fields.text(config, "normalization") or "LayerNorm") == "LayerNorm",
        learned_positions=_learned_positions(config),
    )
    return _changed(base, config)


def _vocabulary(config: Config) -> int | None:
    size = fields.integer(config, "vocab_size", "padded_vocab_size")
    if size is None and ("merge_file" in config.settings or "merge_file" in config.unresolved):
        size = 50257  # the GPT-2 byte-pair vocabulary that --merge-file belongs to
    if size is None:
        return None
    multiple = fields.integer(config, "make_vocab_size_divisible_by") or 1
    multiple *= fields.integer(config, "tensor_model_parallel_size") or 1
    return -(-size // multiple) * multiple


def _tied(config: Config) -> bool:
    shared = fields.flag(config, "share_embeddings_and_output_weights")
    if shared is not None:
        return shared
    return not (fields.flag(config, "untie_embeddings_and_output_weights") or False)


def _biased(config: Config) -> bool:
    biased = fields.flag(config, "add_bias_linear")
    if biased is not None:
        return biased
    return not (fields.flag(config, "disable_bias_linear") or False)


def _learned_positions(config: Config) -> int:
    if (fields.text(config, "position_embedding_type") or "learned_absolute") != "learned_absolute":
        return 0
    return fields.integer(config, "max_position_embeddings") or 0


def _changed(shape: ModelShape, config: Config | None) -> ModelShape:
    """Return `shape` with every size that the configuration sets itself."""
    if config is None:
        return shape
    integers = {
        "num_layers": ("num_layers",),
        "hidden": ("hidden_size",),
        "ffn": ("ffn_hidden_size",),
        "heads": ("num_attention_heads",),
        "head_dim": ("kv_channels",),
        "experts": ("num_moe_experts", "num_experts"),
        "experts_per_token": ("moe_router_topk",),
        "moe_ffn": ("moe_ffn_hidden_size",),
        "shared_ffn": ("moe_shared_expert_intermediate_size",),
        "mtp_layers": ("mtp_num_layers",),
    }
    changes: dict[str, Any] = {}
    for name, keys in integers.items():
        if (value := fields.integer(config, *keys)) is not None:
            changes[name] = value
    if "vocab_size" in config.settings or "padded_vocab_size" in config.settings:
        changes["vocab"] = _vocabulary(config)
    groups = fields.integer(config, "num_query_groups")
    if groups is not None:
        changes["kv_heads"] = groups
    elif "heads" in changes and changes["heads"] != shape.heads:
        changes["kv_heads"] = changes["heads"]
    changes |= _changed_attention(config)
    changes |= _changed_experts(config, shape, changes)
    return checked(shape._replace(**changes))


def _changed_attention(config: Config) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, key in (("qk_norm", "qk_layernorm"), ("qkv_bias", "add_qkv_bias")):
        if (value := fields.flag(config, key)) is not None:
            changes[name] = value
    if fields.flag(config, "multi_latent_attention"):
        changes["q_lora_rank"] = fields.integer(config, "q_lora_rank") or 0
        changes["kv_lora_rank"] = fields.integer(config, "kv_lora_rank") or 512
        changes["qk_nope_head_dim"] = fields.integer(config, "qk_head_dim") or 128
        changes["qk_rope_head_dim"] = fields.integer(config, "qk_pos_emb_head_dim") or 64
        changes["v_head_dim"] = fields.integer(config, "v_head_dim") or 128
    return changes


def _changed_experts(config: Config, shape: ModelShape, changes: dict[str, Any]) -> dict[str, Any]:
    experts = changes.get("experts", shape.experts)
    if not experts:
        return {}
    extra: dict[str, Any] = {
        "moe_pattern": fields.moe_layers(config, changes.get("num_layers", shape.num_layers))
    }
    if "moe_ffn" not in changes and not shape.moe_ffn:
        extra["moe_ffn"] = changes.get("ffn", shape.ffn)
    if "experts_per_token" not in changes and not shape.experts_per_token:
        extra["experts_per_token"] = 2
    return extra


def is_config_json(path: str) -> bool:
    """Whether `path` is a Hugging Face config.json: a JSON object with layers, or with the class of a model."""
    if not path.endswith(".json"):
        return False
    try:
        data = json.loads(_text_of(path))
    except (UnusableInput, ValueError, RecursionError):
        return False
    if not isinstance(data, dict):
        return False
    inner = data.get("text_config")
    has_layers = "num_hidden_layers" in data or (isinstance(inner, dict) and "num_hidden_layers" in inner)
    return has_layers or ("model_type" in data and "architectures" in data)


def _text_of(path: str) -> bytes:
    return read_bytes(path, _JSON_BYTES, expected="a Hugging Face config.json")


def from_config_json(path: str) -> tuple[ModelShape, str]:
    """Build the shape from a Hugging Face config.json, and name the parts of a multimodal model that it leaves out."""
    data = json.loads(_text_of(path))
    shape = from_entries(data, path)
    has_tower = any(isinstance(data.get(name), dict) for name in ("vision_config", "audio_config"))
    return shape, (_TEXT_ALONE if has_tower else "") + _unchecked(data)


def _unchecked(data: dict[str, Any]) -> str:
    """Return a note on a config.json of a kind whose count was never compared with transformers' own."""
    kind = str(_text_part(data).get("model_type", data.get("model_type", "")))
    if not kind or kind in known_models.counted_kinds():
        return ""
    return f", counted as a Llama-like decoder, which {kind[:40]} may not be; {COMMAND} trace counts its own layers"


def _text_part(data: dict[str, Any]) -> dict[str, Any]:
    inner = data.get("text_config")
    return inner if isinstance(inner, dict) else data


def from_entries(data: dict[str, Any], path: str) -> ModelShape:
    """Build the shape from the entries of a config.json that came from `path`; of a multimodal model, its decoder's."""
    architecture = (data.get("architectures") or [""])[0]
    data = _text_part(data)
    if _is_hybrid(data):
        raise UnusableInput(
            f"{path} describes a model with linear-attention or state-space layers",
            expected="a decoder of attention and MLP or expert layers, or such a model traced",
            attempt=_traced(path),
        )
    known = {
        "num_layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "ffn": "intermediate_size",
        "heads": "num_attention_heads",
        "vocab": "vocab_size",
    }
    missing = [key for key in known.values() if not isinstance(data.get(key), int)]
    if missing:
        raise UnusableInput(
            f"{path} has no {', '.join(missing)}",
            expected="a config.json of a decoder, or another model traced",
            attempt=f"--model NAME, or {_traced(path)}",
        )
    values: dict[str, Any] = {name: data[key] for name, key in known.items()}
    values["ffn"] = data.get("intermediate_size_mlp") or values["ffn"]  # Llama 4's dense layers
    values |= _json_attention(data) | _json_experts(data)
    architecture = architecture or data.get("model_type", "")
    return checked(ModelShape(name=f"{architecture or 'model'} of {path}", **values))


def _is_hybrid(data: dict[str, Any]) -> bool:
    """Return whether a config.json has other layers than attention's; where it lists them, the list decides."""
    kinds = data.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return not set(map(str, kinds)) <= _ATTENTION_LAYERS
    return any(key in data for key in _HYBRID)


def _traced(path: str) -> str:
    return f"{COMMAND} trace {path} --out profile.json, then {COMMAND} plan --trace profile.json"


def _json_attention(data: dict[str, Any]) -> dict[str, Any]:
    kind = str(data.get("model_type", ""))
    values: dict[str, Any] = {
        "kv_heads": data.get("num_key_value_heads") or data["num_attention_heads"],
        "head_dim": data.get("head_dim") or 0,
        "tied_embeddings": bool(data.get("tie_word_embeddings", kind.startswith("gemma"))),
        "qk_norm": kind.startswith(("qwen3", "gemma3", "olmo2", "olmo3")) or bool(data.get("use_qk_norm")),
        "qk_norm_whole": kind.startswith(("olmo2", "olmo3")),
        "fused_qkv": kind in _FUSED_QKV,
        "qkv_bias": bool(data.get("attention_bias", False)) or kind.startswith("qwen2"),
        "linear_bias": kind == "gpt_oss",
        "attention_sinks": kind == "gpt_oss",
        "norms_per_layer": 4 if kind.startswith(("gemma2", "gemma3")) or kind in _FOUR_NORMS else 2,
        "mtp_layers": data.get("num_nextn_predict_layers") or 0,
    }
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        values[name] = data.get(name) or 0
    return values


def _json_experts(data: dict[str, Any]) -> dict[str, Any]:
    experts = data.get("n_routed_experts") or data.get("num_local_experts") or data.get("num_experts") or 0
    if not experts:
        return {}
    inner = data.get("moe_intermediate_size") or data["intermediate_size"]
    always = 1 if data.get("model_type") == "llama4_text" else data.get("n_shared_experts") or 0
    shared = data.get("shared_expert_intermediate_size") or always * inner
    return {
        "experts": experts,
        "experts_per_token": data.get("num_experts_per_tok") or 2,
        "moe_ffn": inner,
        "shared_ffn": shared,
        "first_dense": data.get("first_k_dense_replace") or 0,
        "moe_every": data.get("decoder_sparse_step") or data.get("interleave_moe_layer_step") or 1,
    }
