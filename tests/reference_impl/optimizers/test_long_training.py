# SPDX-License-Identifier: Apache-2.0
"""Two hundred steps with half of the states on the CPU, whose kernel rounds differently than the GPU's."""

import copy

import pytest
import torch
from optimizer_reference import MasterAdamW
from optimizer_training import OPTIONS, train
from torch import nn

from reference_impl import CpuUpdate
from reference_impl.verification.kernels import kernels
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss


class Learner(nn.Module):
    """A decoder that learns to repeat its input; on CUDA with so many weights that one's rounding is one of many."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(3)
        width = 256 if device.is_accelerator else 64
        self.shape = DecoderShape(hidden=width, ffn=3 * width, layers=4, heads=4, vocab=4 * width)
        self.decoder = Decoder(self.shape).to(device.torch_device, torch.bfloat16)

    def forward(self, ids):
        return decoder_loss(self.decoder(ids), ids)


@pytest.mark.slow
def test_training_200_steps_agrees_with_no_offload(device, make):
    model = Learner(device)
    plain = copy.deepcopy(model)
    size = (200, 8, 256) if device.is_accelerator else (200, 2, 32)
    data = torch.randint(model.shape.vocab, size, device=device.torch_device)
    optimizer = make(model, offload_fraction=0.5, lr=3e-4, cpu=CpuUpdate(bucket_elements=2**16))
    optimizer.attach(model)
    with kernels(device, fixed_order=True):
        ours = train(model, optimizer, data)
        theirs = train(plain, MasterAdamW(plain, on_cpu=False, **{**OPTIONS, "lr": 3e-4}), data)
    assert ours[-1] < 0.5 * ours[0]
    apart = max(abs(a.item() - b.item()) for a, b in zip(ours, theirs, strict=True))
    assert apart < 1e-3
