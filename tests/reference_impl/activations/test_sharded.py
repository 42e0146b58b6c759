# SPDX-License-Identifier: Apache-2.0
"""Fully sharded models: their weights get new storages in every forward, and still never cross."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [ActivationOffloader, CheckpointOffloader])
def test_a_sharded_model_is_bitwise_the_same_and_its_weights_stay(mesh, kind, monkeypatch):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(layers=3))
    weight_bytes = {p.nbytes for p in model.parameters() if p.dim() > 1}
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    ids = torch.randint(512, (2, 72))

    def step():
        model.zero_grad()
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        return [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]

    expected = step()
    with kind(model, min_bytes=256) as offloader:
        moved, store = [], offloader.engine.tier.store

        def note(source, *, after):
            moved.append(source.numel())
            return store(source, after=after)

        monkeypatch.setattr(offloader.engine.tier, "store", note)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert moved
    # No activation of this batch is as large as a weight.
    assert weight_bytes.isdisjoint(moved)
