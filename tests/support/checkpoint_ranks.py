"""Runs as a script, once a rank: trains under FSDP2 (or alone), and saves or resumes through a distributed checkpoint.

    python checkpoint_ranks.py RANK RANKS STORE_FILE FOLDER save|resume KIND DTYPE FULL

KIND is `adamw`, `hybrid` or `streamed`; FULL is 1 for whole tensors through `StateDictOptions`, 0 for shards.
Every rank sees the same data, so that any number of ranks computes the same bits. `save` trains, saves, and trains on;
what it ends with is written to FOLDER, where `resume` compares.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def net(dtype, ranks):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(13, 70), nn.Tanh(), nn.Linear(70, 5)).to(dtype)
    if ranks > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def optimizer_of(kind, model, lr):
    if kind == "hybrid":
        return hybrid(model, offload_fraction=0.6, lr=lr)
    if kind == "streamed":
        return streaming(model, hyper={**OPTIONS, "lr": lr})
    return torch.optim.AdamW(model.parameters(), fused=True, **{**OPTIONS, "lr": lr})


def train(model, optimizer, steps):
    """Use gradients that any number of ranks has, whatever the order in which collectives add."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            whole = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = shard_like(param, whole)
        optimizer.step()
        optimizer.zero_grad()


def shard_like(param, whole):
    if not isinstance(param, DTensor):
        return whole
    parts = whole.chunk(param.device_mesh.size())
    rank = param.device_mesh.get_local_rank()
    local = parts[rank].clone() if rank < len(parts) else whole[:0].clone()
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=whole.shape, stride=whole.stride()
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(rank, ranks, store, folder, what, kind, dtype, full):
    rank, ranks, folder, dtype = int(rank), int(ranks), Path(folder), getattr(torch, dtype)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    model = net(dtype, ranks)
    options = StateDictOptions(full_state_dict=full == "1", cpu_offload=full == "1")
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 if what == "save" else 0.5)
    optimizer = optimizer_of(kind, model, OPTIONS["lr"] if what == "save" else 9.0)
    if what == "save":
        train(model, optimizer, range(3))
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / "sharded")
        gathered = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        if rank == 0:
            torch.save((weights, gathered), folder / "whole.pt")
        train(model, optimizer, range(3, 6))
        result = [whole(param.detach()) for param in model.parameters()]
        if rank == 0:
            torch.save(result, folder / "result.pt")
    else:
        if full == "1":
            weights, gathered = torch.load(folder / "whole.pt")
            model_state = {
                name: shard_like(value, weights[name]) for name, value in model.state_dict().items()
            }
            model.load_state_dict(model_state)
            set_optimizer_state_dict(model, optimizer, gathered, options=options)
        else:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder / "sharded")
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        train(model, optimizer, range(3, 6))
        for param, expected in zip(model.parameters(), torch.load(folder / "result.pt"), strict=True):
            assert torch.equal(whole(param.detach()), expected), (
                (whole(param.detach()) - expected).abs().max()
            )
    dist.barrier()
    # Both ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
