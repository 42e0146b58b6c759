# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from reference_impl.verification.model import CoreAttention, Decoder, DecoderShape, decoder_loss


def test_training_lowers_the_loss(device):
    model = Decoder(DecoderShape(layers=2)).to(device.torch_device)
    ids = torch.randint(512, (2, 16), device=device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_attention_is_causal(device):
    model = Decoder(DecoderShape(layers=2)).to(device.torch_device)
    ids = torch.randint(512, (1, 16), device=device.torch_device)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 512
    first, second = model(ids), model(changed)
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads=5 does not divide hidden=64"):
        DecoderShape(heads=5)


def test_grouped_queries_are_repeated_keys(device):
    grouped = CoreAttention(DecoderShape(hidden=64, heads=4, kv_heads=2))
    every = CoreAttention(DecoderShape(hidden=64, heads=4))
    q, k, v = (torch.randn(2, 8, heads, 16, device=device.torch_device) for heads in (4, 2, 2))
    repeated = [torch.repeat_interleave(each, 2, dim=2) for each in (k, v)]
    expected = every(torch.cat([q, *repeated], dim=2).flatten(2))
    assert torch.allclose(grouped(torch.cat([q, k, v], dim=2).flatten(2)), expected, atol=1e-6)


def test_groups_must_divide_the_heads():
    with pytest.raises(ValueError, match="kv_heads=3 does not divide heads=4"):
        DecoderShape(heads=4, kv_heads=3)
