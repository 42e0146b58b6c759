# SPDX-License-Identifier: Apache-2.0
"""Tensors that CUDA's kernels of attention and dropout keep; in a trace they replace the CPU's."""

import torch
from torch import nn
from torch.nn import functional

from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.trace import trace


def peak_on_the_twin(model, batch):
    """The most bytes beyond weights and batch that a real step has there; the model returns its loss."""
    with Ledger(Device.of("cpu"), track=[*model.parameters(), batch]) as ledger:
        before = ledger.device_bytes
        model(batch).backward()
        return ledger.peak_device_bytes - before


def test_values_of_another_size_than_queries_take_the_memory_efficient_kernel():
    """As in multi-head latent attention; flash attention's kernel has one size for all three."""

    def loss(model, x):
        query = model(x).view(1, 64, 4, 24).transpose(1, 2)
        result = functional.scaled_dot_product_attention(query, query, query[..., :16], is_causal=True)
        assert result.shape == (1, 4, 64, 16)
        return result.sum()

    held = trace(nn.Linear(96, 96), torch.zeros(1, 64, 96), loss).saved_by
    assert any("efficient_attention" in operation for operation in held)


class MultiQuery(nn.Module):
    """Four heads of queries and one of keys, as Falcon's: for torch's fused kernels too few without `enable_gqa`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 96)])

    def forward(self, x):
        query, key, value = self.blocks[0](x).split((64, 16, 16), -1)
        query = query.unflatten(-1, (4, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(
            query, key[:, None], value[:, None], is_causal=True
        ).sum()


def test_one_head_of_keys_for_several_of_queries_is_matrix_products_that_save_the_scores():
    def loss(model, x):
        return model(x)

    model, x = MultiQuery(), torch.ones(2, 48, 64)
    step = trace(model, x, loss, on_cuda=False)
    assert not any("attention" in operation for operation in step.saved_by)
    assert step.peak_bytes == peak_on_the_twin(model, x)


class Dropped(nn.Module):
    """Blocks of a linear and a dropout whose result the next linear saves."""

    def __init__(self, share, *, layers=3, width=64):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(share)) for _ in range(layers)
        )

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.float().sum()


def test_dropout_keeps_a_byte_an_element_as_on_cuda_and_the_elements_own_as_written():
    batch = torch.ones(8, 128, 64)
    kept, dropped, written = (
        trace(Dropped(share), batch, lambda model, batch: model(batch), attention=attention).layer_bytes[0]
        for share, attention in ((0.0, "flash"), (0.1, "flash"), (0.1, "as written"))
    )
    assert dropped - kept == batch.numel()
    assert written - kept == 4 * batch.numel()


def test_dropout_as_written_is_the_twins_to_the_byte():
    model, batch = Dropped(0.1), torch.ones(8, 128, 64)
    profile = trace(model, batch, lambda model, batch: model(batch), attention="as written")
    assert profile.peak_bytes == peak_on_the_twin(model, batch)
