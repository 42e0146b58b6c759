# SPDX-License-Identifier: Apache-2.0
"""One forward and backward as something to compare bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Result:
    """The results of one forward and backward: bitwise comparable."""

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
