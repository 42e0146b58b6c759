# SPDX-License-Identifier: Apache-2.0
"""The workload of measured runs: the small decoder and its data, the same at every call.

`train` trains it, with whatever is attached to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reference_impl.device import Device
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss
from reference_impl.verification.spread import Spread

# Peaks are taken in the third to fifth step: states exist and the activation engine has learnt its headroom. The ledger
# of the CPU twin slows every operation down, so the steps after them are timed.
FIRST_MEASURED, FIRST_TIMED = 2, 5


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decoder in `dtype` for `steps`, each on `micro_batches` random batches of (batch, tokens).

    With a `lora_rank` everything but adapters of that rank is frozen. With a `spread` every rank of it trains on
    batches of its own.
    """

    shape: DecoderShape
    batch: int
    tokens: int
    steps: int = 20
    micro_batches: int = 1
    dtype: torch.dtype = torch.bfloat16
    lora_rank: int = 0
    spread: Spread | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when no step would be timed."""
        if self.steps <= FIRST_TIMED:
            raise ValueError(f"steps={self.steps}; expected more than {FIRST_TIMED}; try 20")

    @property
    def parameters(self) -> int:
        """Elements of the model, counted without making it."""
        with torch.device("meta"):
            return sum(param.numel() for param in self.new_model().parameters())

    def model(self, device: Device) -> Any:
        """Return the same model at every call, or this rank's part of it."""
        torch.manual_seed(0)
        if self.spread is not None:
            return self.spread.model(self.new_model, device)
        with device.torch_device:
            return self.new_model()

    def new_model(self) -> Any:
        """Return a model with weights of its own on the default device."""
        model = Decoder(self.shape).to(self.dtype)
        if self.lora_rank:
            add_lora(model, self.lora_rank)
        return model

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of `model` over `ids` (batch, tokens)."""
        return decoder_loss(model(ids), ids)

    def batches(self, device: Device) -> Iterator[torch.Tensor]:
        """Yield the same int64 ids (micro_batches, batch, tokens) at every call, one tensor a step."""
        generator = torch.Generator().manual_seed(0 if self.spread is None else dist.get_rank())
        size = (self.micro_batches, self.batch, self.tokens)
        for _ in range(self.steps):
            yield torch.randint(self.shape.vocab, size, generator=generator).to(device.torch_device)

    def describe(self) -> dict[str, Any]:
        """Return sizes, batch and steps as plain data."""
        return {
            **asdict(self.shape),
            "parameters": self.parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": self.batch,
            "tokens": self.tokens,
            "micro_batches": self.micro_batches,
            "steps": self.steps,
            "lora_rank": self.lora_rank,
            **({} if self.spread is None else self.spread.describe()),
        }
