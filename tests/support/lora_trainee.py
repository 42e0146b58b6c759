# SPDX-License-Identifier: Apache-2.0
"""A small decoder in LoRA training, and one step of it as something to compare bit by bit."""

from dataclasses import dataclass

import torch
from one_step import Result, run_step
from torch import nn

from reference_impl.verification.model import Decoder, decoder_loss


@dataclass
class Trainee:
    """A small decoder with adapters, a batch, and its step."""

    model: Decoder
    ids: torch.Tensor

    def loss(self) -> torch.Tensor:
        return decoder_loss(self.model(self.ids), self.ids)

    def step(self) -> Result:
        return run_step(self.model, self.loss)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def layer_bytes(self) -> int:
        """Frozen bytes of a block that are large enough to stream."""
        weights = [p for p in self.layers[0].parameters() if not p.requires_grad and p.nbytes >= 2**14]
        return sum(p.nbytes for p in weights)
