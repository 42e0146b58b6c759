# SPDX-License-Identifier: Apache-2.0
"""Seconds in which all ranks of a host park and restore their training at once, beside the link's.

`torchrun --nproc-per-node 2 benchmarks/parked_ranks.py` trains a decoder under FSDP2 and under DDP with torch's AdamW,
parks it between steps, and prints the slowest rank. `ratio` is to one copy of as many bytes out and back, by all ranks
at once, over as much pinned memory. `left_gb` is the memory that the driver counts as taken on a rank's device while it
is parked. After the timed rounds another process takes all free memory of each rank's GPU while both are parked, writes
it and gives it back, `SHARED_ROUNDS` times: `taken_gb` is the least that one took. Explained in docs/distributed.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from caches import forget_caches
from distributed import leave, of_all_ranks, rates
from distributed_rows import Layout, loss_of, rows
from parking import take_all

from reference_impl import park
from reference_impl.device import Device
from reference_impl.memory.slab import Slab
from reference_impl.parking import ParkedTraining
from reference_impl.verification.model import DecoderShape

ROUNDS = 5
SHARED_ROUNDS = 5
PAUSE_S = 0.5


def seconds(act: Callable[[], object], device: Device) -> float:
    """Return how long `act` takes this rank, from when all ranks begin."""
    device.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    act()
    device.synchronize()
    return time.perf_counter() - begun


def measure(layout: Layout, shape: DecoderShape, device: Device, tokens: int) -> dict[str, Any]:
    """Train, park and restore; return this rank's times of each round, its bytes, and losses beside no parking."""
    row = rows(layout.engine, 10**9)["none"]
    model = row.model(layout, shape, device)
    optimizer = row.build(model)
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(dist.get_rank()))
    ids = ids.to(device.torch_device)
    losses = []

    def step() -> None:
        loss = loss_of(model, device, ids)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()

    step()
    parked = park(model, optimizer.inner)
    away, back, left = [], [], 0.0
    for _ in range(ROUNDS):
        away.append(seconds(parked.park, device))
        if device.is_accelerator:
            free, total = torch.cuda.mem_get_info()
            left = (total - free) / 1e9
        # As a generation does: the driver clears memory that it has taken back, and copies into it wait.
        time.sleep(PAUSE_S)
        back.append(seconds(parked.restore, device))
        optimizer.zero_grad()
        step()
    moved_bytes = sum(parked.report.parked_bytes.values())

    def train() -> None:
        optimizer.zero_grad()
        step()

    taken_gb = shared_with_another(parked, train) if device.is_accelerator else 0.0
    parked.close()
    return {
        "away_s": away,
        "back_s": back,
        "bytes": moved_bytes,
        "left_gb": left,
        "taken_gb": taken_gb,
        "loss": losses,
    }


def link_seconds(size_bytes: int, device: Device) -> tuple[float, float]:
    """Return how long one copy of `size_bytes` out of the device takes, and one back."""
    slab = Slab(device, size_bytes, remedy="a host with more memory")
    part = torch.empty(min(size_bytes, 2**30), dtype=torch.uint8, device=device.torch_device)
    places = slab.bytes[:size_bytes].split(part.numel())

    def out() -> None:
        for place in places:
            place.copy_(part[: place.numel()], non_blocking=True)

    def back() -> None:
        for place in places:
            part[: place.numel()].copy_(place, non_blocking=True)

    out_s, back_s = (min(seconds(act, device) for _ in range(3)) for act in (out, back))
    slab.close()
    return out_s, back_s


def shared_with_another(parked: ParkedTraining, train: Callable[[], None]) -> float:
    """Let another process take this rank's GPU between park() and restore(); return the least that it took, in GB."""
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    other = spawned.Process(target=take_all, args=(theirs, torch.cuda.current_device()), daemon=True)
    other.start()
    taken_bytes = []
    for _ in range(SHARED_ROUNDS):
        dist.barrier()
        with parked:
            ours.send(True)
            taken_bytes.append(ours.recv())
        train()
    ours.send(False)
    other.join()
    return min(taken_bytes) / 1e9


def line(engine: str, ranks: list[dict[str, Any]]) -> dict[str, object]:
    """Return a line of the table: the slowest rank, rounds after the first."""
    found: dict[str, object] = {"row": f"{engine}, {len(ranks)} ranks", "gb": ranks[0]["bytes"] / 1e9}
    for way, name in enumerate(("away", "back")):
        found[f"{name}_first_s"] = max(rank[f"{name}_s"][0] for rank in ranks)
        found[f"{name}_s"] = max(statistics.median(rank[f"{name}_s"][1:]) for rank in ranks)
        found[f"{name}_link_s"] = max(rank["link_s"][way] for rank in ranks)
        found[f"{name}_ratio"] = float(str(found[f"{name}_s"])) / float(str(found[f"{name}_link_s"]))
    found["left_gb"] = max(rank["left_gb"] for rank in ranks)
    return {**found, "taken_gb": min(rank["taken_gb"] for rank in ranks), "loss": ranks[0]["loss"]}


def main() -> None:
    """Measure both engines on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--engines", default="fsdp2,ddp", help="comma separated")
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available() and not args.tiny
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = Device.of("cuda" if is_cuda else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(minutes=3))
    shape, tokens = DecoderShape(hidden=3072, ffn=8192, layers=args.layers, heads=24, vocab=32000), 2048
    if args.tiny:
        shape, tokens = DecoderShape(layers=3), 32
    machine = of_all_ranks(rates(device))
    if dist.get_rank() == 0:
        print(json.dumps(machine))
    for engine in args.engines.split(","):
        mine = measure(Layout(engine), shape, device, tokens)
        forget_caches(device)
        ranks = of_all_ranks(mine | {"link_s": link_seconds(mine["bytes"], device)})
        if dist.get_rank() == 0:
            print(json.dumps(line(engine, ranks)), flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
