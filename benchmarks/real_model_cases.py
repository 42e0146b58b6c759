# SPDX-License-Identifier: Apache-2.0
"""The models, batches and budgets of `real_models.py`: 26 cases, and their toys for a machine without a GPU.

Apart because a case is data, and the use of one is not. Models are Hugging Face's classes with random weights;
the entries of their config.json are those of the profiles that ship, so nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.verification.hugging_face import add_adapters, model_from

GIB = 2**30
_TRACES = Path(__file__).resolve().parents[1] / "skill_tools" / "knowledge" / "traces"
_IMAGE_TOKEN = 32000
_LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": _IMAGE_TOKEN,
    "text_config": {
        "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    },
}  # fmt: skip
# At toy size: every entry of these names is cut to this, so that all kinds of layers stay.
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "sliding_window": 32, "query_pre_attn_scalar": 16, "max_position_embeddings": 256,
    "original_max_position_embeddings": 256, "image_size": 28, "pad_token_id": 0, "projection_dim": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: `sequences` of `tokens`, and the allocator's limit; None is all that the card has free.

    `layers` cuts the model, `lora_rank` freezes it, `is_padded` masks half of the tokens, `has_image` puts one image in
    the text, `chunked_loss` trains with `chunked_cross_entropy`. `held_gib` is the memory that another process holds of
    the card, `cores` how many of the host's this one may use.
    """

    number: int
    model: str
    tokens: int
    budget_gib: float | None
    sequences: int = 1
    layers: int | None = None
    lora_rank: int = 0
    is_padded: bool = False
    has_image: bool = False
    chunked_loss: bool = False
    held_gib: float = 0
    cores: int | None = None

    @property
    def name(self) -> str:
        """The row in words."""
        extra = {
            f"{self.layers} layers": self.layers,
            f"LoRA {self.lora_rank}": self.lora_rank,
            "padded": self.is_padded,
            "1 image": self.has_image,
            "chunked loss": self.chunked_loss,
            f"{self.held_gib:g} GiB held": self.held_gib,
            f"{self.cores} cores": self.cores,
        }
        batch = f"{self.sequences} x {self.tokens}"
        budget = "the card" if self.budget_gib is None else f"{self.budget_gib:g} GiB"
        return ", ".join([self.model, batch, budget, *(text for text, is_so in extra.items() if is_so)])


def _case(number: int, model: str, tokens: int, budget_gib: float | None, **others: Any) -> Case:
    return Case(number=number, model=model, tokens=tokens, budget_gib=budget_gib, **others)


CASES = (
    _case(1, "qwen3-4b", 2048, 24),
    _case(2, "qwen3-4b", 2048, 40),
    _case(3, "qwen3-4b", 4096, 40),
    _case(4, "qwen3-4b", 4096, 60, sequences=4),
    _case(5, "qwen3-4b", 4096, 60, sequences=4, chunked_loss=True),
    _case(6, "qwen3-8b", 2048, 40),
    _case(7, "qwen3-8b", 2048, None),
    _case(8, "qwen3-8b", 8192, 60),
    _case(9, "llama-3-8b", 2048, None),
    _case(10, "llama-3-8b", 2048, 60),
    _case(11, "llama-3-8b", 8192, 48, chunked_loss=True),
    _case(12, "llama-3-8b", 2048, 24),
    _case(13, "llama-3.2-1b", 8192, 16),
    _case(14, "mistral-7b", 4096, 40),
    _case(15, "qwen2-7b", 2048, 48),
    _case(16, "phi-4-mini", 4096, 32),
    _case(17, "gemma-3-4b", 2048, 40),
    _case(18, "gemma-3-4b", 4096, 40),
    _case(19, "qwen3-30b-a3b", 2048, 60, layers=12),
    _case(20, "gpt-oss-20b", 2048, 60, layers=8),
    _case(21, "gpt-oss-20b", 4096, 60, layers=8),
    _case(22, "llava-1.5-7b", 2048, 60, has_image=True),
    _case(23, "llama-3-8b", 4096, 24, lora_rank=16),
    _case(24, "qwen3-4b", 2048, 60, sequences=4, is_padded=True),
    _case(25, "qwen3-4b", 2048, None, held_gib=8),
    _case(26, "qwen3-8b", 2048, 40, cores=8),
)


def entries(case: Case, *, tiny: bool) -> dict[str, Any]:
    """Return the entries of the model's config.json."""
    if case.has_image:
        found: dict[str, Any] = copy.deepcopy(_LLAVA)
    else:
        found = json.loads((_TRACES / f"{case.model}.json").read_text(encoding="utf-8"))["config"]
    if case.layers:
        found["num_hidden_layers"] = case.layers
    return _shrunk(found) if tiny else found


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = {name: _TINY.get(name, value) for name, value in config.items() if value is not None}
    for name in ("text_config", "vision_config"):
        if name in small:
            small[name] = _shrunk(small[name])
    if "num_hidden_layers" in small:
        small["num_hidden_layers"] = 6 if small["model_type"].startswith("gemma") else 4
    if small["model_type"] == "llava":
        small["image_token_index"] = 500
    return small


def make_model(case: Case, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Return the model on `device` in bf16, with adapters where the case has them."""
    torch.manual_seed(0)
    model = model_from(config, "bfloat16", device)
    return add_adapters(model, case.lora_rank) if case.lora_rank else model


def make_batch(case: Case, config: dict[str, Any], tokens: int, device: torch.device, seed: int) -> Any:
    """Return one batch with labels: other ids for another seed, the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(config.get("vocab_size") or config["text_config"]["vocab_size"], _IMAGE_TOKEN)
    if case.has_image:
        vocabulary = config["image_token_index"]
    ids = torch.randint(1, vocabulary, (case.sequences, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if case.is_padded:
        lengths = torch.linspace(tokens / 4, 3 * tokens / 4, case.sequences).long()
        mask = (torch.arange(tokens)[None] < lengths[:, None]).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if case.has_image:
        size, patch = (config["vision_config"][name] for name in ("image_size", "patch_size"))
        batch["input_ids"] = ids.clone()
        batch["input_ids"][:, 1 : 1 + (size // patch) ** 2] = config["image_token_index"]
        pixels = torch.randn(case.sequences, 3, size, size, generator=generator)
        batch["pixel_values"] = pixels.to(torch.bfloat16)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the model's own loss."""
    found: torch.Tensor = model(**batch).loss
    return found


def chunked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the same loss, whose logits exist a chunk at a time."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    return chunked_cross_entropy(model.get_output_embeddings(), hidden[:, :-1], batch["labels"][:, 1:])
