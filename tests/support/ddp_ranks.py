# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: DDP with our optimizers attached, against DDP with torch's AdamW, to the bit.

    python ddp_ranks.py RANK RANKS STORE_FILE cpu|cuda CASE ...

A case is words joined by commas, each a key of one of the tables below: DDP's options, the optimizer's shares, the
moment when gradients leave, their changes before the step, the sum of micro-batches. An unnamed option has the first
value. `splits`: ranks that split otherwise than others are refused. Ends with an error where a loss or a weight
differs, on a rank or between ranks. On CUDA the CPU's share is not compared to the bit, and streams are late.
"""

import itertools
import os
import random
import sys
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from optimizer_training import OPTIONS, hybrid, streaming
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload_arithmetic.update_time import MachineRates
from reference_impl import Budgets, Streaming
from reference_impl.device import Device
from reference_impl.optimizers import auto_split
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.stand_in import GradientStandIn

# Unused parameters: with `unused` in some steps on some ranks or all of them, with `static` always on all.
WRAPS = {
    "views": {"gradient_as_bucket_view": True},
    "copies": {},
    "static": {"gradient_as_bucket_view": True, "static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unusedviews": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
SHARES = {
    "cpu": (0.0, 0.0, 1.0),
    "streamed": (0.0, 1.0, 0.0),
    "thirds": (0.3, 0.4, 0.3),
    "resident": (1.0, 0.0, 0.0),
    "auto": "auto",
    "offloader": None,
}
OVERLAPS = ("gradients", "nothing", "update")
# `scaled`: by a GradScaler, in whose second step one rank overflows.
CLIPS = ("clipped", "unclipped", "scaled")
# `unsynced` in no_sync(); `reduced` in accumulate(); `added` in neither.
ACCUMULATIONS = ("once", "unsynced", "reduced", "added")
STEPS, WIDTH, ROWS, MAX_NORM, SCALE = 5, 11, 37, 0.05, 2.0**10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 70), nn.Linear(70, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(nn.Module):
    """An embedding with its weight shared by the head, three blocks, and one used `rarely`, if at all."""

    def __init__(self, *, rarely):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.rare = Block() if rarely else None
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, ids, uses_rare):
        hidden = self.embed(ids)
        for block in (*self.blocks, *([self.rare] if uses_rare else [])):
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.flatten())


def wrapped(wrap, device):
    torch.manual_seed(3)
    model = Model(rarely=wrap in ("static", "unused", "unusedviews")).to(device)
    # Small buckets, so that there are several: all but the first iteration's, which is one.
    return DistributedDataParallel(model, bucket_cap_mb=0.002, **WRAPS[wrap])


def uses_rare(wrap, step, rank):
    """In the first step on no rank, then on the first, on all, on none and on the last."""
    return (
        wrap in ("unused", "unusedviews")
        and (step, rank) not in ((0, rank), (3, rank))
        and (step == 2 or (rank == 0) == (step == 1))
    )


def optimizer_of(parallel, shares, overlap, clip):
    model, max_norm = parallel.module, MAX_NORM if clip == "clipped" else None
    if shares == "offloader":
        return streaming(model, chunk_bytes=2048, max_grad_norm=max_norm)
    options = {}
    if shares == "auto":
        options["budgets"] = Budgets(ranks=parallel.process_group)
    small = Streaming(chunk_bytes=1024, prefetch_bytes=0 if shares == "auto" else 2**16)
    return hybrid(
        model,
        split=SHARES[shares],
        streaming=small,
        backward_overlap=overlap,
        max_grad_norm=max_norm,
        **options,
    )


def rates_of(rank):
    """A probe that finds the link of every rank twice as fast as the one before, and meets them."""

    def probe(device, meet):
        meet()
        return MachineRates(link_bytes_per_s=2.0**rank * 1e9, host_bytes_per_s=1e11, cpu_elements_per_s=1e8)

    return probe


def backward(parallel, optimizer, batches, flag, accumulation, scaler):
    """Back propagate each batch, the last one as the last of a step; return its loss.

    The block that is rare is used with the first one alone, if at all; with each one where all of them are reduced and
    leave.
    """
    for batch in batches[:-1]:
        context = nullcontext()
        if accumulation == "unsynced":
            context = parallel.no_sync()
        elif accumulation == "reduced" and hasattr(optimizer, "accumulate"):
            context = optimizer.accumulate()
        with context:
            scaler.scale(parallel(batch, flag)).backward()
        flag = flag and accumulation == "added"
    loss = parallel(batches[-1], flag)
    scaler.scale(loss).backward()
    return loss.detach()


def break_gradient(parallel, case, step, rank):
    """Let one rank's own gradients overflow, before they are reduced, in the second step of a scaled run."""
    if case["clip"] != "scaled" or step != 1 or rank != 0:
        return nullcontext()
    handle = parallel.module.blocks[0].up.bias.register_hook(lambda gradient: gradient * float("inf"))
    return _Removed(handle)


class _Removed:
    def __init__(self, handle):
        self.handle = handle

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


def step_plainly(parallel, inner, norm, clip):
    """Step torch's AdamW, which divides gradients as the exact clipping does."""
    grads = [param.grad for param in parallel.parameters() if param.grad is not None]
    if clip == "clipped":
        mine = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        torch.testing.assert_close(norm, mine)
        assert norm > MAX_NORM
        inner.grad_scale = torch.clamp((norm + 1e-6) / MAX_NORM, min=1.0)
    inner.step()
    inner.zero_grad()


def compare(words, rank, ranks, device):
    named = words.split(",")
    tables = {
        "wrap": WRAPS, "shares": SHARES, "overlap": OVERLAPS, "clip": CLIPS, "accumulation": ACCUMULATIONS
    }  # fmt: skip
    assert all(any(word in table for table in tables.values()) for word in named), words
    case = {
        name: next((word for word in named if word in table), next(iter(table)))
        for name, table in tables.items()
    }
    wrap, shares, overlap, clip = (case[name] for name in ("wrap", "shares", "overlap", "clip"))
    ours, plain = (wrapped(wrap, device) for _ in range(2))
    inner = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    scalers = [
        torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=clip == "scaled") for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(rank)
    size = 1 if case["accumulation"] == "once" else 3
    if shares == "auto":
        auto_split._probe = rates_of(rank)
    same = torch.equal
    if device.type == "cuda" and shares in ("cpu", "thirds", "auto"):
        # The CPU's kernel rounds otherwise than the device's.
        same = partial(torch.allclose, rtol=1e-3, atol=1e-4)
    with optimizer_of(ours, shares, overlap, clip) as optimizer:
        optimizer.attach(ours)
        if shares == "auto":
            assert 0.1 < optimizer.split.cpu < 0.9, optimizer.split
        for step in range(STEPS):
            batches = [torch.randint(0, ROWS, (3, 5), generator=generator).to(device) for _ in range(size)]
            if wrap == "static" and step == 0:
                # In its first iteration torch looks for static parts of the graph, and fails in no_sync().
                batches = batches[-1:]
            flag = uses_rare(wrap, step, rank)
            with break_gradient(ours, case, step, rank):
                loss = backward(ours, optimizer, batches, flag, case["accumulation"], scalers[0])
            if overlap == "gradients" and shares == "cpu" and case["accumulation"] != "added":
                left = [param.grad for param in ours.parameters() if param.grad is not None]
                assert left, "nothing was used"
                assert all(isinstance(grad, GradientStandIn) for grad in left), "gradients stay"
            scalers[0].step(optimizer)
            scalers[0].update()
            optimizer.zero_grad()
            with break_gradient(plain, case, step, rank):
                other = backward(plain, None, batches, flag, case["accumulation"], scalers[1])
            assert same(loss, other), f"the loss of step {step} differs"
            if clip == "scaled":
                scalers[1].step(inner)
                scalers[1].update()
                inner.zero_grad()
                assert scalers[0].get_scale() == scalers[1].get_scale() == SCALE / (1 if step < 1 else 2)
            else:
                step_plainly(plain, inner, optimizer.grad_norm, clip)
        optimizer.synchronize()
        for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert same(one, other), name
        assert_same_on_all_ranks(ours, rank)
    dist.barrier()


def assert_same_on_all_ranks(parallel, rank):
    for name, param in parallel.named_parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, param), f"{name} differs on rank {rank}"


def refuse_splits(rank, device):
    """Ranks that do not split alike are refused, all of them."""
    parallel = wrapped("views", device)
    refused = pytest.raises(ValueError, match=r"\(0\.0, 0\.0, 1\.0\), \(0\.0, 0\.5, 0\.5\)")
    with hybrid(parallel, split=(0.0, rank * 0.5, 1 - rank * 0.5)) as optimizer, refused:
        optimizer.attach(parallel)
    dist.barrier()


@contextmanager
def delays(rank):
    """Let this rank's streams run up to 20 ms late: reductions, copies of gradients to the host and of weights back."""
    device, chance = Device.of("cuda"), random.Random(rank)
    places = [
        (dist, "all_reduce", nullcontext),
        (GradientMover, "_copy", device.on_d2h_for_threads),
        (Publisher, "publish", device.on_h2d_of_weights),
    ]

    def late(call, stream):
        def called(*arguments, **options):
            with stream():
                torch.cuda._sleep(chance.choice([1, 4_000_000, 40_000_000]))
            return call(*arguments, **options)

        return called

    with ExitStack() as undo:
        for place, name, stream in places:
            original = getattr(place, name)
            undo.callback(setattr, place, name, original)
            setattr(place, name, late(original, stream))
        yield


def main(rank, ranks, store, place, *cases):
    rank, ranks = int(rank), int(ranks)
    device = torch.device(place, rank) if place == "cuda" else torch.device(place)
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
    for torch_says in ("find_unused_parameters=True was specified", "Detected call of `lr_scheduler"):
        warnings.filterwarnings("ignore", torch_says)
    # `added` means to be told.
    warnings.filterwarnings("ignore", "a second backward has added to gradients")
    for case in cases:
        print(case, flush=True)
        if case == "splits":
            refuse_splits(rank, device)
            continue
        with delays(rank) if place == "cuda" else nullcontext():
            compare(case, rank, ranks, device)
    # All ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


def every_case():
    """All that are served."""
    for words in itertools.product(WRAPS, SHARES, OVERLAPS, CLIPS, ACCUMULATIONS):
        wrap, shares, overlap, clip, accumulation = words
        # An update in backward cannot be clipped, skipped, or added to, nor know unused parameters.
        begins = overlap == "update"
        refused = begins and (
            clip != "unclipped" or accumulation == "added" or wrap not in ("views", "copies")
        )
        if not refused and (shares != "offloader" or overlap == "gradients"):
            yield ",".join(words)


if __name__ == "__main__":
    main(*sys.argv[1:])
