# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: FSDP2 with our optimizers attached, against FSDP2 with torch's AdamW, to the bit.

    python sharded_ranks.py RANK RANKS STORE_FILE cpu|late|cuda|sleepy CASE ...

A case is words joined by commas, each a key of one of the tables below: how the model is sharded, which shares the
optimizer has, when gradients leave, whether they are clipped, how micro-batches add up. An unnamed option has the first
value. Ends with an error if anything differs, or if a gather reads a shard without a wait for it. `late` is the CPU
with late copies and hesitating gathers, differently on each rank; `sleepy` is CUDA whose copies, updates and gathers
sleep on their streams.
"""

import itertools
import os
import random
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from late_device import LateTwin
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from offload_arithmetic.update_time import MachineRates
from reference_impl import ShardStreamer, Streaming
from reference_impl.device import Device
from reference_impl.device.cuda import CudaDevice
from reference_impl.distributed.mesh import local_of
from reference_impl.optimizers import auto_split
from reference_impl.optimizers.gradients.stand_in import GradientStandIn

LAYOUTS = ("blocks", "hsdp", "prefetched", "grouped", "kept", "root", "checkpointed", "mixed", "partly")
SHARES = {
    "cpu": (0.0, 0.0, 1.0),
    "streamed": (0.0, 1.0, 0.0),
    "thirds": (0.3, 0.4, 0.3),
    "resident": (1.0, 0.0, 0.0),
    "auto": "auto",
    "offloader": None,
    "everything": None,
}
OVERLAPS = ("gradients", "nothing", "update")
# `by-torch` is the user's own `clip_grad_norm_`, to the norm of `clipped`.
CLIPS = {"clipped": 0.05, "unclipped": None, "by-torch": None}
ACCUMULATIONS = ("once", "reduced", "unreduced")
STEPS, WIDTH, ROWS = 4, 11, 37


class Block(nn.Module):
    """Rows 7 and 11: uneven shards; of a vector of 1 most ranks have nothing."""

    def __init__(self, checkpointed):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.checkpointed = checkpointed

    def forward(self, hidden):
        return checkpoint(self.run, hidden, use_reentrant=False) if self.checkpointed else self.run(hidden)

    def run(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden))) * self.scale


class Model(nn.Module):
    """An embedding with its weight shared by the head, and four blocks; the second may run twice."""

    def __init__(self, checkpointed, *, twice):
        super().__init__()
        self.twice = twice
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(4))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in (*self.blocks, *([self.blocks[1]] if self.twice else [])):
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.flatten())


def sharded(layout, device, ranks, *, twice):
    torch.manual_seed(3)
    model = Model(layout == "checkpointed", twice=twice).to(device)
    if layout == "partly":
        for param in model.blocks[2].parameters():
            param.requires_grad = False
    shape = (2, ranks // 2) if layout == "hsdp" else (ranks,)
    options = {"mesh": init_device_mesh(device.type, shape, mesh_dim_names=("r", "s")[-len(shape) :])}
    if layout == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if layout == "kept":
        options["reshard_after_forward"] = False
    if layout == "grouped":
        fully_shard([model.blocks[2], model.blocks[3]], **options)
    for block in model.blocks if layout != "root" else ():
        if not isinstance(block, FSDPModule):
            fully_shard(block, **options)
    fully_shard(model, **options)
    if layout == "prefetched":
        for here, *ahead in (model.blocks[i : i + 3] for i in range(3)):
            here.set_modules_to_forward_prefetch(ahead)
        model.set_modules_to_forward_prefetch([model.blocks[0]])
    return model


class ShardedAdamW:
    """Torch's fused AdamW over this rank's shards, with the norm that it is told."""

    def __init__(self, model, max_grad_norm):
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [nn.Parameter(param.to_local().detach().clone()) for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **OPTIONS)
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, norm):
        if norm is not None:
            mine = get_total_norm([param.grad for param in self.params]).full_tensor()
            torch.testing.assert_close(norm, mine)
            if self.max_grad_norm is not None:
                assert norm > self.max_grad_norm
                self.inner.grad_scale = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.grad.to_local().clone()
            param.grad = None
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.to_local().copy_(master)


class WatchedGathers:
    """Raises if a gather reads a shard without a wait for its new weight; counts those that still wait.

    Before each gather it calls `hesitate`.
    """

    hesitate = staticmethod(lambda: None)

    def __init__(self, optimizer):
        self.optimizer, self.most_left = optimizer, 0
        self.original = FSDPParamGroup.unshard

    def unshard(self, group, async_op=False):
        members = self.optimizer.members
        read = [members[each.sharded_param] for each in group.fsdp_params if each.sharded_param in members]
        WatchedGathers.hesitate()
        if group.is_sharded and group._all_gather_result is None:
            assert not any(member.pending for member in read), "a gather reads weights that are on their way"
            self.most_left = max(self.most_left, sum(member.pending for member in members.values()))
        return self.original(group, async_op)

    def __enter__(self):
        FSDPParamGroup.unshard = lambda group, async_op=False: self.unshard(group, async_op)
        return self

    def __exit__(self, *_):
        FSDPParamGroup.unshard = self.original


@contextmanager
def attached(model, shares, overlap, clip):
    """Yield an optimizer for `model`; with `everything` off, its weights and gradients are on the host too."""
    if shares == "everything":
        wrapped = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True, **OPTIONS)
        options = {"streaming": Streaming(chunk_bytes=1024), "max_grad_norm": CLIPS[clip]}
        with ShardStreamer(model, wrapped, **options) as streamer:
            yield streamer.optimizer
        return
    with optimizer_of(model, shares, overlap, clip) as optimizer:
        optimizer.attach(model)
        yield optimizer


def optimizer_of(model, shares, overlap, clip):
    if shares == "offloader":
        return streaming(model, chunk_bytes=2048, max_grad_norm=CLIPS[clip])
    # Some states stay, of a rank's 4 kB. Then `auto` would have nothing to split.
    small = Streaming(chunk_bytes=1024, prefetch_bytes=0 if shares == "auto" else 1024)
    return hybrid(
        model, split=SHARES[shares], streaming=small, backward_overlap=overlap, max_grad_norm=CLIPS[clip]
    )


def rates_of(rank):
    """A probe that finds the link of every rank twice as fast as the one before, and meets them."""

    def probe(device, meet):
        meet()
        return MachineRates(link_bytes_per_s=2.0**rank * 1e9, host_bytes_per_s=1e11, cpu_elements_per_s=1e8)

    return probe


def backward(model, optimizer, batches, accumulation):
    """Back propagate each batch, the last one as the last of a step."""
    for batch in batches[:-1]:
        if accumulation == "unreduced":
            model.set_requires_gradient_sync(False)
            model(batch).backward()
            model.set_requires_gradient_sync(True)
        elif hasattr(optimizer, "accumulate"):
            with optimizer.accumulate():
                model(batch).backward()
        else:
            model(batch).backward()
    loss = model(batches[-1])
    loss.backward()
    return loss.detach()


def compare(case, rank, ranks, device):
    words = case.split(",")
    tables = (LAYOUTS, SHARES, OVERLAPS, CLIPS, ACCUMULATIONS)
    layout, shares, overlap, clip, accumulation = (
        next((word for word in words if word in table), next(iter(table))) for table in tables
    )
    assert all(any(word in table for table in tables) for word in words), case
    # Unreduced gradients of a block that runs twice are reduced in two parts; these may not leave one by one.
    twice = accumulation != "unreduced" or overlap == "nothing"
    ours, plain = (sharded(layout, device, ranks, twice=twice) for _ in range(2))
    reference = ShardedAdamW(plain, CLIPS[clip])
    generator = torch.Generator().manual_seed(rank)
    size = 1 if accumulation == "once" else 3
    data = [[torch.randint(0, ROWS, (3, 5), generator=generator) for _ in range(size)] for _ in range(STEPS)]
    if shares == "auto":
        auto_split._probe = rates_of(rank)
    with attached(ours, shares, overlap, clip) as optimizer, WatchedGathers(optimizer) as watched:
        if shares == "auto":
            splits = [None] * ranks
            dist.all_gather_object(splits, optimizer.split)
            assert splits == splits[:1] * ranks, splits
            # On four ranks the slots alone have room for all states.
            assert ranks > 2 or 0.1 < splits[0].cpu < 0.9, splits
        for batches in data:
            batches = [batch.to(device) for batch in batches]
            loss = backward(ours, optimizer, batches, accumulation)
            if overlap == "gradients" and shares in ("cpu", "everything"):
                left = [local_of(param.grad) for param in ours.parameters() if param.requires_grad]
                assert all(isinstance(each, GradientStandIn) or not each.numel() for each in left), (
                    "gradients stay"
                )
            norm = clip_grad_norm_(ours.parameters(), CLIPS["clipped"]) if clip == "by-torch" else None
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(loss, backward(plain, None, batches, accumulation)), "the loss differs"
            if norm is not None:
                theirs = clip_grad_norm_(plain.parameters(), CLIPS["clipped"]).full_tensor()
                assert torch.equal(norm.full_tensor(), theirs), "the norm differs"
                assert theirs > CLIPS["clipped"]
            reference.step(optimizer.grad_norm)
        optimizer.synchronize()
        for (name, one), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            # Of everything off it is on the host.
            assert torch.equal(one.to_local().cpu(), other.to_local().cpu()), name
        some_leave = shares in ("offloader", "everything") or optimizer.split.resident < 1
    if some_leave and layout != "root" and ranks > 1 and rank == 0:
        assert watched.most_left > 0, "step() has waited for all"
    dist.barrier()


def sleeping(original):
    """Let a stream of the device sleep for a while whenever it is made current."""

    @contextmanager
    def enter(device, *size_bytes):
        with original(device, *size_bytes):
            WatchedGathers.hesitate()
            yield

    return enter


def main(rank, ranks, store, place, *cases):
    rank, ranks = int(rank), int(ranks)
    chance = random.Random(rank)
    is_cuda = place in ("cuda", "sleepy")
    if place == "late":
        LateTwin.seed, Device.classes["cpu"] = rank, LateTwin
        WatchedGathers.hesitate = lambda: time.sleep(chance.choice((0.0, 0.0, 0.002)))
    if place == "sleepy":
        # Cycles of some GHz: none, a tenth of a millisecond, a millisecond.
        WatchedGathers.hesitate = lambda: torch.cuda._sleep(chance.choice((0, 200_000, 2_000_000)))
        for name in ("on_h2d", "on_d2h", "on_d2h_for_threads", "on_update_stream"):
            setattr(CudaDevice, name, sleeping(getattr(CudaDevice, name)))
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
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
        compare(case, rank, ranks, device)
    # All ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


def every_case():
    """All that are served."""
    for words in itertools.product(LAYOUTS, SHARES, OVERLAPS, CLIPS, ACCUMULATIONS):
        _, shares, overlap, clip, _ = words
        clips_too_late = overlap == "update" and clip != "unclipped"
        if not clips_too_late and (shares not in ("offloader", "everything") or overlap == "gradients"):
            yield ",".join(words)


if __name__ == "__main__":
    main(*sys.argv[1:])
