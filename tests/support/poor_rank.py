"""Runs as a script, once a rank: everything off where one rank cannot, so that none does and all say why.

python poor_rank.py RANK RANKS STORE_FILE
"""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import ROWS, attached, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_impl import ShardStreamer
from reference_impl.memory.host import HostMemoryError
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.trained_layers import room


def streamed(model):
    return ShardStreamer(model, torch.optim.AdamW(model.parameters(), fused=True))


def refuse(model, ranks, rank, patched, error, said):
    """Let `patched` fail on the last rank: it raises `error`, and the others quote it."""
    is_poor = rank == ranks - 1
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        if is_poor:
            patched(patch)
        with pytest.raises(error if is_poor else RuntimeError, match=said) as caught:
            streamed(model)
    assert is_poor or str(caught.value).startswith(
        f"another rank has failed, so this one ends too: rank {ranks - 1}:"
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[name]), name


def main(rank, ranks, store):
    rank, ranks = int(rank), int(ranks)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=40),
    )
    model = sharded("blocks", torch.device("cpu"), ranks, twice=False)

    def host_is_full(patch):
        patch.setattr(room, "available_bytes", lambda: 2**30)

    def device_is_full(patch):
        def add(*_):
            raise torch.OutOfMemoryError("no room for slots")

        patch.setattr(StreamedShare, "add", add)

    refuse(model, ranks, rank, host_is_full, HostMemoryError, "masters and moments")
    refuse(model, ranks, rank, device_is_full, torch.OutOfMemoryError, "no room for slots")
    with attached(model, "everything", "gradients", "clipped") as optimizer:
        model(torch.randint(0, ROWS, (3, 5))).backward()
        optimizer.step()
    if ranks > 2:
        # To as many ranks as there are, or to one, means True or False.
        mesh = init_device_mesh("cpu", (ranks,))
        elsewhere = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=2)
        with pytest.raises(ValueError, match="reshard_after_forward is a number of ranks"):
            streamed(elsewhere)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
