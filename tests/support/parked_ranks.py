# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: training parked under FSDP2 and DDP, against unparked training.

python parked_ranks.py RANK RANKS STORE_FILE cpu|cuda CASE ...

Ends with an error where anything differs. In the case `fails` rank 1 has no memory, on the host and on the device, or a
call fails there: all ranks end with an error that names it, and go on.
"""

import os
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from small_net import loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reference_impl import HybridDeviceOptimizer, ShardStreamer, Streaming, park
from reference_impl.memory.arena import HostArena
from reference_impl.memory.host import HostMemoryError
from reference_impl.parking import parked as room
from reference_impl.parking.storage import ParkedStorage
from reference_impl.parking.views import UnnamedViews


def net(place):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))).to(place)


def sharded(place, mesh):
    model = net(place)
    for block in model:
        fully_shard(block, mesh=mesh)
    # Kept gathered between forward and backward.
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def replicated(place, mesh, *, views):
    return DistributedDataParallel(net(place), gradient_as_bucket_view=views)


def stock(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def three_ways(model):
    split = {"split": (0.3, 0.4, 0.3), "streaming": Streaming(chunk_bytes=4096)}
    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, max_grad_norm=0.1, **split)
    optimizer.attach(model)
    return optimizer


def everything_off(model):
    wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return ShardStreamer(model, wrapped).optimizer


CASES = {
    "fsdp": (sharded, stock),
    "fsdp-ours": (sharded, three_ways),
    "fsdp-streamed": (sharded, everything_off),
    "ddp-views": (lambda place, mesh: replicated(place, mesh, views=True), stock),
    "ddp": (lambda place, mesh: replicated(place, mesh, views=False), stock),
    "ddp-ours": (lambda place, mesh: replicated(place, mesh, views=False), three_ways),
}


def trained(case, place, mesh, *, parks):
    build, optimize = CASES[case]
    model = build(place, mesh)
    optimizer = optimize(model)
    parked = park(model, optimizer) if parks else None
    losses = []
    for step in range(3):
        loss = loss_of(model, 10 * step + dist.get_rank())
        loss.backward(retain_graph=True)
        losses.append(loss.item())
        if parks:
            with parked:
                assert parked.report.parked_bytes["weights"] or case == "fsdp-streamed"
                if case == "fsdp":
                    saved = parked.state_dict(while_parked=True)
                    assert all(each._local_tensor.device.type == "cpu" for each in saved["model"].values())
                    parked.load_state_dict(saved, while_parked=True)
                    refuses(loss.backward)
            if case == "fsdp":
                for name, shard in model.state_dict().items():
                    assert torch.equal(shard.to_local().cpu(), saved["model"][name].to_local()), name
        optimizer.step()
        if parks:
            with parked:
                pass
        optimizer.zero_grad()
    if parks:
        parked.close()
    weights = [
        value.full_tensor() if hasattr(value, "full_tensor") else value
        for value in model.state_dict().values()
    ]
    return losses, [each.clone() for each in weights]


def refuses(action):
    """A call between a park() and its restore() is an error on each rank, in front of any collective."""
    with pytest.raises(RuntimeError, match=r"try restore\(\)"):
        action()


def fails_on_rank_1(action, error, owner, name):
    """All ranks end `action` with an error that names rank 1: there the call `name` of `owner` raises `error`."""

    def fail(*args, **kwargs):
        raise error

    real = getattr(owner, name)
    if dist.get_rank() == 1:
        setattr(owner, name, fail)
    try:
        with pytest.raises(type(error) if dist.get_rank() == 1 else RuntimeError) as met:
            action()
    finally:
        setattr(owner, name, real)
    assert "rank 1" in str(met.value) or "on rank 1" in met.value.__notes__


def fails(place, mesh):
    for build in (sharded, lambda place, mesh: replicated(place, mesh, views=True)):
        model = build(place, mesh)
        optimizer = stock(model)
        parked = park(model, optimizer, timeout_s=0.0)
        loss_of(model, 0).backward()
        no_host = HostMemoryError(needed_bytes=1, available_bytes=0, remedy="try less")
        for error, owner, name in (
            (no_host, HostArena, "allocate"),
            (MemoryError("no memory"), room, "find"),
            (RuntimeError("a kernel fails"), UnnamedViews, "add_to"),
        ):
            fails_on_rank_1(parked.park, error, owner, name)
            assert parked.status == "present"
        parked.park()
        for error in (torch.OutOfMemoryError("no memory"), RuntimeError("the link is down")):
            fails_on_rank_1(parked.restore, error, ParkedStorage, "start_copy_in")
            assert parked.status == "parked"
        parked.restore()
        optimizer.step()
        loss_of(model, 1).backward()
        parked.close()


def main(rank, ranks, store, place, *cases):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if place == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place == "cuda" else "gloo",
        store=dist.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh(place, (int(ranks),))
    for case in cases:
        if case == "fails":
            fails(place, mesh)
        else:
            losses, weights = trained(case, place, mesh, parks=True)
            want_losses, want = trained(case, place, mesh, parks=False)
            assert losses == want_losses, case
            assert all(map(torch.equal, weights, want)), case
        print(case, "is the same", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    # Gloo's threads outlive the group: with torch 2.13 one of both processes aborted at its end in 7 of 30 runs.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
