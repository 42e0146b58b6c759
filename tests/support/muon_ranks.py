# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: FSDP2 with Muon off the device, against `torch.optim.Muon` over whole fp32 masters.

    python muon_ranks.py RANK RANKS STORE_FILE cpu|late|cuda CASE ...

A case is `refused`, `rounded`, or words joined by commas, each a key of one of the tables below; an unnamed option has
the first value. The reference has all gradients gathered, and is one process's training: torch's own Muon over fp32
copies of whole matrices, each of a stack a parameter of its own, beside torch's AdamW over this rank's shards of the
rest (its kernel for CPUs rounds the last elements of a tensor in another way). Ends with an error if a bit of a weight,
of a momentum or of a loss differs, or if more than the directions of Muon crosses between ranks. `late` is the CPU with
late copies and hesitating gathers, differently on each rank.
"""

import os
import random
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from late_device import LateTwin
from muon_reference import ADAMW, MUON
from sharded_ranks import WatchedGathers, backward
from stacked_products import one_by_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, ShardStreamer, Streaming
from reference_impl.device import Device
from reference_impl.optimizers import Dion, Muon

LAYOUTS = ("blocks", "hsdp", "mixed", "columns", "root")
SHARES = {
    "streamed": (0, 1, 0),
    "resident": (1, 0, 0),
    "thirds": (0.3, 0.4, 0.3),
    "offloader": None,
    "everything": None,
}
CLIPS = {"clipped": 0.05, "unclipped": None}
ACCUMULATIONS = ("once", "reduced", "unreduced")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# `nan`: in one step one rank has a gradient that is not finite, so all ranks skip it. `gone`: the last rank fails.
# `batched`: owners transform several matrices in one call, for the bits of one call each.
TROUBLES = ("none", "nan", "gone", "batched")
TABLES = (LAYOUTS, SHARES, CLIPS, ACCUMULATIONS, DTYPES, TROUBLES)
STEPS, WIDTH, ROWS = 4, 12, 37


class Block(nn.Module):
    """Matrices of 7, 12 and 2 rows, of which ranks have uneven shards or none, and a stack of three."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.few = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 5) / 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        hidden = hidden + self.down(torch.tanh(self.up(hidden))) * self.scale
        hidden = hidden + torch.tanh(hidden @ self.few.t()) @ self.few
        return hidden + (hidden @ self.experts.sum(0)) @ self.experts[0].t()


class Model(nn.Module):
    """An embedding shared by the head, a matrix used twice, and four blocks, one with a frozen matrix."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].down.weight.requires_grad = False
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.also = nn.Linear(WIDTH, WIDTH, bias=False)
        self.also.weight = self.last.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, ids):
        hidden = self.also(self.embed(ids))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.last(hidden) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) * self.factor


def columns(param):
    """Shard matrices by columns, and each matrix of a stack by rows."""
    return Shard(1) if param.dim() > 1 else Shard(0)


def sharded(layout, dtype, ranks, device):
    torch.manual_seed(3)
    model = Model().to(dtype)
    shape = (2, ranks // 2) if layout == "hsdp" else (ranks,)
    options = {"mesh": init_device_mesh(device.type, shape, mesh_dim_names=("r", "s")[-len(shape) :])}
    if layout == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout == "columns":
        # FSDP2 cuts other dimensions than the first evenly only.
        for block in model.blocks:
            block.up, block.few = (
                nn.Linear(WIDTH, 8, bias=False).to(dtype),
                nn.Parameter(block.few.detach().clone()),
            )
            block.down = nn.Linear(8, WIDTH, bias=False).to(dtype)
        options["shard_placement_fn"] = columns
    model.to(device)
    for block in model.blocks if layout != "root" else ():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def parts_of(model, shares):
    """Return the trained parameters updated by Muon, and all other trained ones.

    Stacks are Muon's only without a wrapped optimizer: torch's Muon refuses them.
    """
    most = 2 if SHARES[shares] is None else 3
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if 1 < param.dim() <= most and param is not model.embed.weight]
    return matrices, [param for param in trained if all(param is not each for each in matrices)]


class WholeMuon:
    """Torch's Muon over fp32 copies of whole matrices and AdamW over those of shards, with the norm that it is told."""

    def __init__(self, model, shares, max_grad_norm):
        matrices, rest = parts_of(model, shares)
        self.params, self.max_grad_norm = [*matrices, *rest], max_grad_norm
        self.masters = {param: param.full_tensor().detach().float().clone() for param in self.params}
        self.matrices = {
            param: [nn.Parameter(each) for each in (whole.unbind() if whole.dim() == 3 else [whole])]
            for param, whole in self.masters.items()
            if any(param is each for each in matrices)
        }
        self.vectors = {param: nn.Parameter(param.to_local().detach().float().clone()) for param in rest}
        self.muon = torch.optim.Muon([each for listed in self.matrices.values() for each in listed], **MUON)
        self.adamw = torch.optim.AdamW(list(self.vectors.values()), fused=True, **ADAMW)

    @torch.no_grad()
    def step(self, norm):
        scale = None
        if norm is not None and not torch.isfinite(norm):
            for param in self.params:
                param.grad = None
            return
        if self.max_grad_norm is not None:
            assert norm > self.max_grad_norm
            scale = self.adamw.grad_scale = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
        for param in self.params:
            grad = param.grad.full_tensor().float()
            if param in self.vectors:
                self.vectors[param].grad = param.grad.to_local().float()
                continue
            grad = grad if scale is None else grad.div_(scale)
            for master, part in zip(
                self.matrices[param], grad.unbind() if grad.dim() == 3 else [grad], strict=True
            ):
                master.grad = part
        self.muon.step()
        self.adamw.step()
        for param in self.params:
            own = self.vectors.get(param)
            param.to_local().copy_(shard_of(param, self.masters[param]) if own is None else own)
            param.grad = None

    def momentum(self, param):
        parts = [self.muon.state[each]["momentum_buffer"] for each in self.matrices[param]]
        return torch.stack(parts) if param.dim() == 3 else parts[0]


def shard_of(param, whole):
    """Return this rank's shard of a whole tensor, in the parameter's placement."""
    (mesh_dim, placement), *_ = [
        (dim, each) for dim, each in enumerate(param.placements) if not each.is_replicate()
    ]
    parts = whole.chunk(param.device_mesh.size(mesh_dim), dim=placement.dim)
    rank = param.device_mesh.get_local_rank(mesh_dim)
    return parts[rank] if rank < len(parts) else whole[:0]


@contextmanager
def trained(model, shares, clip, chunk_bytes, *, states="exact"):
    """Yield an optimizer of ours for `model`, attached."""
    matrices, rest = parts_of(model, shares)
    clipping, small = {"max_grad_norm": CLIPS[clip]}, Streaming(chunk_bytes=chunk_bytes, states=states)
    if SHARES[shares] is None:
        wrapped = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, fused=True, **ADAMW)]
    if shares == "everything":
        with ShardStreamer(model, wrapped, streaming=small, **clipping) as streamer:
            yield streamer.optimizer
        return
    if shares == "offloader":
        optimizer = OptimizerStateOffloader(wrapped, chunk_bytes=chunk_bytes, **clipping)
    else:
        groups = [{"params": matrices, "use_muon": True, **MUON}, {"params": rest, **ADAMW}]
        optimizer = HybridDeviceOptimizer(
            groups, split=SHARES[shares], streaming=small, backward_overlap="gradients", **clipping
        )
    with optimizer:
        optimizer.attach(model)
        yield optimizer


class CountedExchanges:
    """Counts the elements that this rank sends to others, and fails like a broken link if it is told to."""

    def __init__(self):
        self.sent, self.breaks = 0, False

    def __enter__(self):
        self.original = dist.all_to_all_single

        def counted(received, sent, its, ours, group):
            if self.breaks:
                raise OSError("the link of this rank is broken")
            self.sent += sum(ours) - ours[group.rank()]
            self.original(received, sent, its, ours, group=group)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_):
        dist.all_to_all_single = self.original


def spoil(model, rank):
    """Let one element of a gradient that the first rank has be not finite."""
    if rank == 0:
        grad = model.blocks[1].up.weight.grad.to_local()
        if grad.numel():
            grad.view(-1)[0] = float("nan")


def check_traffic(sent, model, shares):
    """Both ways all ranks together send each element once, except an owner's own; and rounding up."""
    cut = [param for param in parts_of(model, shares)[0] if param.placements[-1].dim != param.dim() - 3]
    (group,) = {param.device_mesh.get_group(len(param.placements) - 1) for param in cut}
    total = torch.tensor(sent, device=cut[0].device_mesh.device_type)
    dist.all_reduce(total, group=group)
    least = STEPS * 2 * sum(param.numel() for param in cut) * (group.size() - 1) / group.size()
    rounding = STEPS * 2 * 64 * group.size() * sum(1 if param.dim() == 2 else param.shape[0] for param in cut)
    assert total <= least * 1.5 + rounding, (int(total), least, rounding)


def check_refusals(ranks):
    """Shards in two dimensions, and a formula that needs whole matrices from its first line on."""
    plane = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (ranks,))
    for mesh, placements, formula, said in (
        (plane, [Shard(0), Shard(1)], Muon(), "expected shards in one dimension"),
        (line, [Shard(0)], Dion(), "expected all of it on this rank; try Muon"),
        (line, [Shard(0)], Muon(), "streamed share for them"),
    ):
        param = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, placements))
        split = (0, 0, 1) if "streamed" in said else (0, 1, 0)
        with pytest.raises(ValueError, match=said):
            HybridDeviceOptimizer([{"params": [param], "algorithm": formula}], split=split)


def check_rounded(rank, ranks, device):
    """Momentum in bf16 is rounded by its place in a shard alone: chunks change no bit, and exact ones are near."""
    for layout, shares in (("blocks", "streamed"), ("columns", "everything")):
        found = []
        for states, chunk_bytes in (("bf16-moments", 1024), ("bf16-moments", 8192), ("exact", 1024)):
            model = sharded(layout, torch.bfloat16, ranks, device)
            generator = torch.Generator().manual_seed(rank)
            with trained(model, shares, "clipped", chunk_bytes, states=states) as optimizer:
                for _ in range(STEPS):
                    model(torch.randint(0, ROWS, (3, 5), generator=generator).to(device)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.synchronize()
                found.append([each.to_local().float().cpu() for each in model.state_dict().values()])
        first, second, exact = (torch.cat([each.flatten() for each in listed]) for listed in found)
        assert torch.equal(first, second), shares
        assert 0 < (first - exact).norm() < 0.02 * exact.norm(), ((first - exact).norm(), exact.norm())


def compare(case, rank, ranks, device):
    words = case.split(",")
    layout, shares, clip, accumulation, dtype, trouble = (
        next((word for word in words if word in table), next(iter(table))) for table in TABLES
    )
    assert all(any(word in table for table in TABLES) for word in words), case
    ours, plain = (sharded(layout, DTYPES[dtype], ranks, device) for _ in range(2))
    reference = WholeMuon(plain, shares, CLIPS[clip])
    generator = torch.Generator().manual_seed(rank)
    size = 1 if accumulation == "once" else 3
    data = [
        [torch.randint(0, ROWS, (3, 5), generator=generator).to(device) for _ in range(size)]
        for _ in range(STEPS)
    ]
    stacks = one_by_one() if trouble == "batched" else None
    with (
        trained(ours, shares, clip, 8192 if trouble == "batched" else 1024) as optimizer,
        WatchedGathers(optimizer) as watched,
        CountedExchanges() as exchanges,
    ):
        if stacks is not None:
            # The attempt before the first step.
            stacks.clear()
        for number, batches in enumerate(data):
            exchanges.breaks = trouble == "gone" and number == 2 and rank == ranks - 1
            spoils, on_host = trouble == "nan" and number == 1, shares == "everything"
            ours.factor = plain.factor = float("nan") if spoils and on_host and rank == 0 else 1.0
            loss = backward(ours, optimizer, batches, accumulation)
            if spoils and not on_host:
                spoil(ours, rank)
            optimizer.step()
            optimizer.zero_grad()
            expected = backward(plain, None, batches, accumulation)
            assert torch.allclose(loss, expected, rtol=0, atol=0, equal_nan=True), "the loss differs"
            if spoils:
                assert not torch.isfinite(optimizer.grad_norm)
            reference.step(optimizer.grad_norm)
        optimizer.synchronize()
        check_traffic(exchanges.sent, ours, shares)
        assert stacks is None or max(stacks) > 1, "no rank has a stack"
        assert rank or layout == "root" or watched.most_left, "step() has waited for all"
        for (name, one), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(one.to_local().cpu(), other.to_local().cpu()), name
        mine, theirs = parts_of(ours, shares)[0], parts_of(plain, shares)[0]
        for param, other in zip(mine, theirs, strict=True):
            momentum = optimizer.state[param]["momentum_buffer"].to_local()
            expected = shard_of(other, reference.momentum(other))
            assert torch.equal(momentum.cpu(), expected.cpu()), tuple(param.shape)
    dist.barrier()


def main(rank, ranks, store, place, *cases):
    rank, ranks = int(rank), int(ranks)
    chance = random.Random(rank)
    if place == "late":
        LateTwin.seed, Device.classes["cpu"] = rank, LateTwin
        WatchedGathers.hesitate = lambda: time.sleep(chance.choice((0.0, 0.0, 0.002)))
    device = torch.device("cuda", rank) if place == "cuda" else torch.device("cpu")
    if place == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if place == "cuda" else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=40),
    )
    warnings.simplefilter("error", UserWarning)
    # Torch's words about CUDA.
    for told in ("Requested unified CUBLASLT workspace", r"barrier\(\): using the device"):
        warnings.filterwarnings("ignore", told)
    for case in cases:
        print(case, flush=True)
        if case == "refused":
            check_refusals(ranks)
        elif case == "rounded":
            check_rounded(rank, ranks, device)
        else:
            compare(case, rank, ranks, device)
    # All ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
