# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch
from one_step import Result, run_step

from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss


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
