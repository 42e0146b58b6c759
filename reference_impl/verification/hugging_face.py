# SPDX-License-Identifier: Apache-2.0
"""The model that a Hugging Face `config.json` describes, on `meta`: transformers' own code, no weights, no network.

Apart because it alone knows transformers, which is optional.

Explained in docs/tracing.md.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

_NAMES = frozenset({"transformers_version", "id2label", "label2id", "dtype", "torch_dtype"})


def model_of(config: str | Path, dtype: str = "bfloat16") -> nn.Module:
    """Return the model of `config`, a `config.json` or its folder, on `meta` and in training mode.

    `dtype` is torch's name of that of the weights.
    It is the class that `architectures` names, else the causal language model of the `model_type`. Raises ImportError
    without transformers, OSError for a missing file, ValueError for a model unknown to the installed transformers.
    """
    return model_from(read_config(config), dtype)


def read_config(config: str | Path) -> dict[str, Any]:
    """Return the entries of `config`, a `config.json`, its folder, or a model profile that was traced from one.

    Entries that say nothing about the model's code, such as paths and names of labels, are left out. Raises OSError
    for a missing file, ValueError for one that describes no model.
    """
    entries = _json_of(config)
    if isinstance(entries, dict) and isinstance(entries.get("config"), dict):
        entries = entries["config"]
    if not isinstance(entries, dict) or not isinstance(entries.get("model_type"), str):
        raise ValueError("it has no `model_type`")
    return {name: value for name, value in entries.items() if name not in _NAMES and name[0] != "_"}


def images_of(config: str | Path) -> int:
    """Return how many images a sequence had when the model profile `config` was traced; 0 for a `config.json`.

    Raises as `read_config`.
    """
    entries = _json_of(config)
    return int(entries.get("images", 0)) if isinstance(entries, dict) and "steps" in entries else 0


def _json_of(config: str | Path) -> Any:
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None


def model_from(
    entries: Mapping[str, Any], dtype: str = "bfloat16", device: torch.device | str = "meta"
) -> nn.Module:
    """Return the model that the `entries` of a `config.json` describe, as `model_of` does, with random weights."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    named = copy.deepcopy(dict(entries))
    try:
        settings = AutoConfig.for_model(named.pop("model_type"), **named)
    except Exception as error:  # a config class checks its arguments with errors of many types
        raise ValueError(
            f"transformers {transformers.__version__} cannot read it: {str(error).splitlines()[0]}"
        ) from None
    own: Any = getattr(transformers, str((entries.get("architectures") or [None])[0]), None)
    has_own = isinstance(own, type) and issubclass(own, PreTrainedModel)
    if not has_own and type(settings) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal language model of type {settings.model_type}, and architectures names no class"
        )
    make = own._from_config if has_own else AutoModelForCausalLM.from_config
    with torch.device(device):
        model: nn.Module = make(settings, dtype=getattr(torch, dtype))
    return model.train()


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return `model` frozen, with peft's LoRA of `rank` beside every linear layer but the head.

    Peft keeps adapters of bf16 models in fp32. Raises ImportError without peft.
    """
    import peft

    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    return adapted.train()


def image_batch(entries: Mapping[str, Any], images: int, dtype: str) -> Callable[[int, int], dict[str, Any]]:
    """Return a function that makes a batch like `text_batch`, with `images` of the config's size in each sequence.

    Their tokens are in the length; which they are makes no difference on `meta`. Raises ValueError for a config that
    names no size.
    """
    size = (entries.get("vision_config") or {}).get("image_size")
    if not isinstance(size, int):
        raise ValueError(
            f"vision_config has image_size={size!r}; expected the side of square images in pixels"
        )

    def batch(sequences: int, length: int) -> dict[str, Any]:
        shape = (sequences * images, 3, size, size)
        pixels = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        return text_batch(sequences, length) | {"pixel_values": pixels}

    return batch


def tokens_to_trace(model: nn.Module, longest: int) -> int:
    """Return a length that `model` takes `longest` times: 2,048, or less for a short table of positions."""
    config: Any = model.config
    positions: int = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    # A few models have two more rows in it.
    has_table = positions > 0 and any(
        isinstance(module, nn.Embedding) and positions <= module.num_embeddings <= positions + 2
        for module in model.modules()
    )
    return min(2048, max(positions // longest, 1)) if has_table else 2048


def text_batch(sequences: int, length: int) -> dict[str, torch.Tensor]:
    """Return text with labels: int64 (sequences, length) on `meta`, without padding or images."""
    ids = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def without_caches(model: nn.Module) -> Callable[[], None]:
    """Have a Hugging Face model keep no keys and values for generating: recomputation would append to them twice.

    Return the call that undoes it.
    """
    configs = {id(config): config for config in _configs(model) if getattr(config, "use_cache", False)}
    for config in configs.values():
        config.use_cache = False

    def undo() -> None:
        for config in configs.values():
            config.use_cache = True

    return undo


def _configs(model: nn.Module) -> Iterator[Any]:
    return (config for module in model.modules() if (config := getattr(module, "config", None)) is not None)
