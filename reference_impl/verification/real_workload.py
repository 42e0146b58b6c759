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

    Its loss is its own, its LoRA peft's.
    """

    config: Mapping[str, Any]

    def new_model(self) -> nn.Module:
        """Return the model on the default device."""
        dtype = str(self.dtype).removeprefix("torch.")
        model = hugging_face.model_from(self.config, dtype, torch.get_default_device())
        # A cache of keys and values is for generating, and would keep what is to be recomputed.
        model.config.use_cache = False  # type: ignore[union-attr]
        return hugging_face.add_adapters(model, self.lora_rank) if self.lora_rank else model

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss that the model computes where it is given labels."""
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
