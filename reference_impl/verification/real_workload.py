# SPDX-License-Identifier: Apache-2.0
"""A real model in place of the small decoder: the class that a plan was traced from, with random weights of its shape.

Apart because it alone needs transformers, which is optional.

Explained in docs/tracing.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reference_impl.verification import hugging_face
from reference_impl.verification.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RealWorkload(Workload):
    """The model of a `config.json`'s entries; its `shape` says the sizes alone.

    Its loss is its own, its LoRA peft's. Each sequence begins with `images` of the config's size.
    """

    config: Mapping[str, Any]
    images: int = 0

    def new_model(self) -> nn.Module:
        """Return the model on the default device."""
        dtype = str(self.dtype).removeprefix("torch.")
        model = hugging_face.model_from(self.config, dtype, torch.get_default_device())
        # A cache of keys and values is for generating, and would keep tensors that are to be recomputed.
        model.config.use_cache = False  # type: ignore[union-attr]
        return hugging_face.add_adapters(model, self.lora_rank) if self.lora_rank else model

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Return the model's own loss, computed from labels."""
        ids, given = self._with_images(ids) if self.images else (ids, {})
        loss: torch.Tensor = model(input_ids=ids, labels=ids, **given).loss
        return loss

    def _with_images(self, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return `ids` (int64, sequences and tokens) that begin with LLaVA's image ids, and the images' noise."""
        size, patch = (self.config["vision_config"][name] for name in ("image_size", "patch_size"))
        token = self.config["image_token_index"]
        count = self.images * (size // patch) ** 2
        ids = torch.where(ids == token, 0, ids)
        ids[:, :count] = token
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(len(ids) * self.images, 3, size, size, generator=generator)
        return ids, {"pixel_values": pixels.to(ids.device, self.dtype)}
