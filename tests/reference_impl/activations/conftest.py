from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.training.model import Decoder, DecoderShape, decoder_loss


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
    return Result(
        loss.detach().clone(),
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    )


@dataclass
class Trainee:
    """A small decoder, a batch, and its step."""

    model: Decoder
    ids: torch.Tensor

    def loss(self) -> torch.Tensor:
        return decoder_loss(self.model(self.ids), self.ids)

    def step(self) -> Result:
        return run_step(self.model, self.loss)


@pytest.fixture
def trainee(device: Device) -> Trainee:
    model = Decoder(DecoderShape(layers=4)).to(device.torch_device)
    return Trainee(model, torch.randint(512, (2, 128), device=device.torch_device))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def host_memory_comes_back():
    """Every test leaves the host tier as it found it."""
    before = host_book.live_bytes
    yield
    assert host_book.live_bytes == before
