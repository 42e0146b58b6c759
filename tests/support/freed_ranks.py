# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: how many bytes of gradients a backward under FSDP2 leaves on the device.

    python freed_ranks.py RANK RANKS STORE_FILE

Eight equal blocks, each with a reduction of its own. Of those that the CPU updates nothing may stay, beside whatever
else streams or is resident; all train to the bit as FSDP2 with torch's AdamW does, and a state_dict carries over to an
optimizer that divides the parameters otherwise.
"""

import gc
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from optimizer_training import hybrid
from sharded_ranks import ShardedAdamW
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers import placement

BLOCKS, WIDTH, STEPS, MAX_NORM = 8, 64, 3, 0.05
# How many blocks' gradients stay.
STAY = {
    (0.0, 1.0, 0.0): 8,
    (0.0, 0.5, 0.5): 4,
    (0.0, 0.0, 1.0): 0,
    # One block is cut where it begins to leave, so that the share is exact.
    (0.25, 0.25, 0.5): 5,
    # And one where the last one streams.
    (0.0, 0.3, 0.7): 3,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


def sharded(ranks):
    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(model, split):
    # As recipes do, with and without weight decay: no block's parameters are neighbours.
    groups = [
        {"params": [param for param in model.parameters() if (param.dim() > 1) == is_matrix]}
        for is_matrix in (True, False)
    ]
    return hybrid(groups, split=split, backward_overlap="gradients", max_grad_norm=MAX_NORM)


def lasting_bytes(ledger):
    """Return the device bytes that stay: a thread of gloo's may hold a buffer for a moment after its reduction."""
    gc.collect()
    readings = []
    for _ in range(10):
        time.sleep(0.005)
        readings.append(ledger.device_bytes)
    return min(readings)


def trained(model, optimizer, data):
    """Return the losses and norms, and the device bytes that the last backward has added."""
    losses, norms = [], []
    with Ledger(Device.of("cpu")) as ledger:
        for batch in data:
            optimizer.synchronize()
            gc.collect()
            before = ledger.device_bytes
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.detach())
            del loss
            left = lasting_bytes(ledger) - before
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
    return losses, norms, left


def trained_plainly(model, data, norms):
    """Return the losses."""
    optimizer, losses = ShardedAdamW(model, MAX_NORM), []
    for batch, norm in zip(data, norms, strict=True):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step(norm)
        losses.append(loss.detach())
    return losses


def left_blocks(split, ranks, data):
    """Return how many blocks' gradients a backward leaves on the device; compare losses and weights."""
    ours, plain = sharded(ranks), sharded(ranks)
    with optimizer_of(ours, split) as optimizer:
        optimizer.attach(ours)
        losses, norms, left = trained(ours, optimizer, data)
        assert all(map(torch.equal, losses, trained_plainly(plain, data, norms))), "a loss differs"
        optimizer.synchronize()
        for (name, one), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(one.to_local(), other.to_local()), name
    return left / sum(param.to_local().nbytes for param in ours[0].parameters())


def carry_over(ranks, data):
    """Load states into an optimizer whose parameters are divided one by one, and back."""
    known = placement.reductions
    for saves, loads in ((known, dict), (dict, known)):
        one, other = sharded(ranks), sharded(ranks)
        placement.reductions = saves
        with optimizer_of(one, (0.0, 0.5, 0.5)) as saving:
            trained(one, saving, data)
            placement.reductions = loads
            other.load_state_dict(one.state_dict())
            with optimizer_of(other, (0.0, 0.5, 0.5)) as loading:
                assert [m.streamed for m in saving.members.values()] != [
                    m.streamed for m in loading.members.values()
                ]
                loading.load_state_dict(saving.state_dict())
                losses, others = (trained(one, saving, data)[0], trained(other, loading, data)[0])
                assert all(map(torch.equal, losses, others)), "a loss differs"
    placement.reductions = known


def main(rank, ranks, store):
    rank, ranks = int(rank), int(ranks)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    # Objects loaded by now are left out of collections, which then take milliseconds.
    gc.freeze()
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(6, WIDTH, generator=generator) for _ in range(STEPS)]
    left = {split: left_blocks(split, ranks, data) for split in STAY}
    # Beside them there are losses and norms, each of 4 bytes.
    assert all(abs(left[split] - blocks) < 0.1 for split, blocks in STAY.items()), left
    carry_over(ranks, data)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
