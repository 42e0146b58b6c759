# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from lora_trainee import Trainee

from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.verification.model import Decoder, DecoderShape, add_lora


@pytest.fixture
def trainee(device: Device) -> Trainee:
    model = Decoder(DecoderShape(layers=6)).to(device.torch_device)
    add_lora(model, rank=4)
    return Trainee(model, torch.randint(512, (2, 32), device=device.torch_device))


@pytest.fixture(autouse=True)
def host_memory_comes_back():
    """Every test leaves the host tier as it found it."""
    before = host_book.live_bytes
    yield
    assert host_book.live_bytes == before
