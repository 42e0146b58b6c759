"""A small decoder in LoRA training, and one step of it as something to compare bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from reference_impl.training.model import Decoder, decoder_loss


@dataclass
class Result:
    """What one forward and backward gave: bitwise comparable."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Result)
        assert torch.equal(self.loss, other.loss)
        assert self.gradients.keys() == other.gradients.keys()
        for name, gradient in self.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), name
        return True


def run_step(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Result:
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return Result(loss.detach().clone(), gradients)


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
