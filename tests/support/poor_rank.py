# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: if one rank cannot, none does, and all say why.

    python poor_rank.py RANK RANKS STORE_FILE

The memory of a host is that of all its ranks together; other errors are one rank's own, and the others quote it.
"""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from optimizer_training import hybrid, streaming
from sharded_ranks import ROWS, attached, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_impl import ShardStreamer
from reference_impl.distributed import host_room
from reference_impl.memory.host import HostMemoryError, host_book
from reference_impl.memory.slab import RESERVE_BYTES
from reference_impl.optimizers.streamed.share import StreamedShare


def streamed(model):
    return ShardStreamer(model, torch.optim.AdamW(model.parameters(), fused=True))


# The maker of each, and its items of host memory.
TAKERS = {
    "everything off": (
        streamed,
        r"weights of blocks \d.*, gradients \d.*, masters and moments \d.*; try .*more hosts",
    ),
    "three shares": (
        lambda model: hybrid(model, split=(0.2, 0.4, 0.4), backward_overlap="gradients"),
        r"staging of the CPU share \d.*, its masters and moments \d.*, streamed states \d.*; try offload_fraction=",
    ),
    "states": (streaming, r"streamed states \d.*; try fraction="),
}


def weights_of(model):
    return {name: value.to_local().clone() for name, value in model.state_dict().items()}


def assert_untouched(model, before, books):
    assert (host_book.live_bytes, host_book.reserved_bytes) == books
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[name]), name


def refused_for_memory(model, make, pools, said):
    """Let each rank find `pools`, which suffices for none; return how many bytes the error says are needed."""
    before, books = weights_of(model), (host_book.live_bytes, host_book.reserved_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_by_pool", lambda: pools)
        with pytest.raises(HostMemoryError, match=said) as caught:
            make(model)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert texts == texts[:1] * len(texts), texts
    assert_untouched(model, before, books)
    return caught.value.needed_bytes


def taken(model, make, pools):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_by_pool", lambda: pools)
        make(model).close()


def share_a_host(model, ranks, rank, name):
    """One rank has not the room; each has, and all together have not; then they have."""
    make, items = TAKERS[name]
    poor = {"host": RESERVE_BYTES + 10} if rank == ranks - 1 else {"host": 2**50}
    needed = refused_for_memory(
        model, make, poor, rf"rank {ranks - 1} on \S+, one of {ranks} that share it, needs {items}"
    )
    # On the twin the moved weights are host memory that is given back.
    freed = sum(value.to_local().nbytes for value in model.parameters()) if name == "everything off" else 0
    room = RESERVE_BYTES + needed * 3 // 4 - freed * ranks
    refused_for_memory(model, make, {"host": room}, f"one of {ranks} that share it")
    taken(model, make, {"host": RESERVE_BYTES + needed})
    # In containers of their own they share less.
    taken(model, make, {"host": 2**50, f"container of {rank}": room})


def refuse(model, ranks, rank, patched, error, said):
    """Let `patched` fail on the last rank: it raises `error`, and the others quote it."""
    is_poor = rank == ranks - 1
    before, books = weights_of(model), (host_book.live_bytes, host_book.reserved_bytes)
    with pytest.MonkeyPatch.context() as patch:
        if is_poor:
            patched(patch)
        with pytest.raises(error if is_poor else RuntimeError, match=said) as caught:
            streamed(model)
    assert is_poor or str(caught.value).startswith(
        f"another rank has failed, so this one ends too: rank {ranks - 1}:"
    )
    assert_untouched(model, before, books)


def main(rank, ranks, store):
    rank, ranks = int(rank), int(ranks)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    model = sharded("blocks", torch.device("cpu"), ranks, twice=False)
    for name in TAKERS:
        share_a_host(model, ranks, rank, name)

    def device_is_full(patch):
        def add(*_):
            raise torch.OutOfMemoryError("no room for slots")

        patch.setattr(StreamedShare, "add", add)

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
