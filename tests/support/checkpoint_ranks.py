# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: trains under FSDP2 (or alone), and saves or resumes through a distributed checkpoint.

    python checkpoint_ranks.py RANK RANKS STORE_FILE FOLDER save|resume

SAVED says which optimizers save, in which dtype: `adamw`, `hybrid`, `streamed` or `everything` (off, and sharded even
alone), and with Muon for the matrices `muon` and `muon-everything`. Each is resumed by all, those with Muon by
themselves, from shards and from whole tensors.
Every rank sees the same data, so that any number of ranks computes the same bits. `save` trains, saves, and trains on;
its last state is written to a folder of its own in FOLDER, where `resume` compares.
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

from reference_impl import HybridDeviceOptimizer, ShardStreamer, Streaming

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
KINDS = ("hybrid", "streamed", "everything", "adamw")
MUON_KINDS = ("muon", "muon-everything")
SAVED = [
    *((kind, dtype) for kind in MUON_KINDS for dtype in (torch.float32, torch.bfloat16)),
    *((kind, torch.float32) for kind in KINDS),
    *((kind, torch.bfloat16) for kind in ("hybrid", "streamed")),
]


def net(dtype, ranks, kind):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(13, 70), nn.Tanh(), nn.Linear(70, 5)).to(dtype)
    if ranks > 1 or kind.endswith("everything"):
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def optimizer_of(kind, model, lr):
    if kind in MUON_KINDS:
        return muon_of(kind, model, lr)
    if kind == "hybrid":
        return hybrid(model, offload_fraction=0.6, lr=lr)
    if kind == "streamed":
        return streaming(model, hyper={**OPTIONS, "lr": lr})
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **{**OPTIONS, "lr": lr})
    return ShardStreamer(model, adamw).optimizer if kind == "everything" else adamw


def muon_of(kind, model, lr):
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    if kind == "muon":
        groups = [{"params": matrices, "use_muon": True, "lr": lr}, {"params": rest, **OPTIONS, "lr": lr}]
        return HybridDeviceOptimizer(groups, split=(0.3, 0.7, 0), streaming=Streaming(chunk_bytes=4096))
    adamw = torch.optim.AdamW(rest, fused=True, **{**OPTIONS, "lr": lr})
    return ShardStreamer(model, [torch.optim.Muon(matrices, lr=lr), adamw]).optimizer


def train(model, optimizer, steps):
    """Use gradients equal for any number of ranks, whatever the order of sums in collectives."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            whole = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = shard_like(param, whole)
        optimizer.step()
        optimizer.zero_grad()
        if not isinstance(optimizer, torch.optim.AdamW):
            # No forward comes that would wait.
            optimizer.synchronize()


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


def save(folder, kind, dtype, ranks):
    model = net(dtype, ranks, kind)
    optimizer = optimizer_of(kind, model, OPTIONS["lr"])
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "sharded")
    gathered = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save((weights, gathered), folder / "whole.pt")
    train(model, optimizer, range(3, 6))
    result = [whole(value) for value in model.state_dict().values()]
    if dist.get_rank() == 0:
        torch.save(result, folder / "result.pt")


def resume(folder, kind, dtype, ranks, *, whole_tensors):
    model = net(dtype, ranks, kind)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    optimizer = optimizer_of(kind, model, 9.0)
    if whole_tensors:
        weights, gathered = torch.load(folder / "whole.pt")
        model_state = {name: shard_like(value, weights[name]) for name, value in model.state_dict().items()}
        model.load_state_dict(model_state)
        set_optimizer_state_dict(model, optimizer, gathered, options=WHOLE)
    else:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / "sharded")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(3, 6))
    for value, expected in zip(model.state_dict().values(), torch.load(folder / "result.pt"), strict=True):
        assert torch.equal(whole(value), expected), (whole(value) - expected).abs().max()


def main(rank, ranks, store, folder, what):
    rank, ranks = int(rank), int(ranks)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    for saved, dtype in SAVED:
        case = Path(folder) / f"{saved}-{dtype}"
        if what == "save":
            print(case.name, "saves", file=sys.stderr, flush=True)
            case.mkdir(exist_ok=True)
            save(case, saved, dtype, ranks)
            continue
        # Plain AdamW in bf16 has no masters, so its numbers are others.
        kinds = KINDS if dtype is torch.float32 else KINDS[:-1]
        # Torch's checkpoints want the same keys, and groups of torch's own Muon have no `use_muon`.
        kinds = (saved,) if saved in MUON_KINDS else kinds
        for kind in kinds:
            for whole_tensors in (False, True):
                print(f"{kind} resumes {case.name}, {whole_tensors=}", file=sys.stderr, flush=True)
                resume(case, kind, dtype, ranks, whole_tensors=whole_tensors)
    dist.barrier()
    # Both ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
