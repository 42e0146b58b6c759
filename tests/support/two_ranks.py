# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: FSDP2 with uneven and empty shards, or DDP, over two ranks that see different data.

    python two_ranks.py RANK 2 STORE_FILE cpu|cuda fsdp:OFFLOAD_FRACTION|hsdp:OFFLOAD_FRACTION|ddp:OFFLOAD_FRACTION ...

Compares four clipped steps with one process on all of the data, once for each of the last words, and ends with an error
if they differ.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from optimizer_training import OPTIONS, hybrid
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reference_impl import CpuUpdate

RANKS, MAX_NORM = 2, 0.05
MESHES = {"fsdp": (RANKS,), "hsdp": (RANKS, 1)}


def net(device):
    """Rows 5, 3 and 1: of the last layer the second rank has nothing."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)


def data_of(rank, device):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 13, generator=generator).to(device) for _ in range(4)]


def train(model, optimizer, data):
    norms = []
    for batch in data:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    optimizer.synchronize()
    return torch.stack(norms)


def train_alone(model, halves):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    norms = []
    for batches in zip(*halves, strict=True):
        for batch in batches:
            (model(batch).square().sum() / RANKS).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def compare(rank, place, device, how, fraction):
    model, plain = net(device), net(device)
    options = {"offload_fraction": fraction, "max_grad_norm": MAX_NORM}
    options["cpu"] = CpuUpdate(bucket_elements=64)
    if how in MESHES:
        mesh = init_device_mesh(
            place, MESHES[how], mesh_dim_names=("replicate", "shard")[-len(MESHES[how]) :]
        )
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh)
        assert model[4].weight.to_local().numel() == (3 if rank == 0 or how == "hsdp" else 0)
        trained = model
    else:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        options["backward_overlap"] = "nothing"
    with hybrid(model, **options) as optimizer:
        if how == "ddp":
            optimizer.attach(trained)
        norms = train(trained, optimizer, data_of(rank, device))
        expected = train_alone(plain, [data_of(other, device) for other in range(RANKS)])
        assert expected.min() > MAX_NORM
        torch.testing.assert_close(norms, expected)
        for one, its in zip(model.parameters(), plain.parameters(), strict=True):
            whole = one.detach().full_tensor() if isinstance(one, DTensor) else one.detach()
            torch.testing.assert_close(whole, its.detach())
            others = [torch.empty_like(whole) for _ in range(RANKS)]
            dist.all_gather(others, whole)
            assert all(torch.equal(other, whole) for other in others)
        for param, state in optimizer.state.items():
            assert state["exp_avg"].shape == param.shape
    if how in MESHES:
        skip_together(rank, model, data_of(rank, device)[0])
    dist.barrier()


def skip_together(rank, model, batch):
    """A gradient that is undefined on one rank alone makes all of them leave the step out, without clipping too."""
    with hybrid(model, backward_overlap="nothing") as optimizer:
        before = [param.to_local().clone() for param in model.parameters()]
        model(batch).square().sum().backward()
        if rank == 0:
            model[0].weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        optimizer.synchronize()
        same = [torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same), same
        assert optimizer.grad_norm.isnan()


def main(rank, _ranks, store, place, *cases):
    rank = int(rank)
    device = torch.device(place, rank) if place == "cuda" else torch.device(place)
    if place == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if place == "cuda" else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        # A rank whose neighbour has ended with an error ends too.
        timeout=timedelta(seconds=40),
    )
    for case in cases:
        how, fraction = case.split(":")
        print(case, file=sys.stderr)
        compare(rank, place, device, how, float(fraction))
    # Both ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
