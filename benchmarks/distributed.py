# SPDX-License-Identifier: Apache-2.0
"""Optimizer offload under FSDP2 or DDP against no offload and torch's CPUOffloadPolicy, all rows in one process group.

Two GPUs of 80 GB and 150 GB of host memory, under five minutes; 1.5e9 parameters a rank:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --out distributed.json

Four GPUs, the 6.1e9 parameters of docs/distributed.md:

    torchrun --standalone --nproc-per-node 4 benchmarks/distributed.py --layers 52 --tokens 4096,16384 --out four.json

DDP on two GPUs of 141 GB, with 150 GB of host memory; each rank has all 3.1e9 parameters and their states:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --engine ddp --tokens 32768 --out ddp.json

The same code at toy size, on any machine:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --tiny [--engine ddp]

Two replicas of two shards each (HSDP):

    torchrun --standalone --nproc-per-node 4 benchmarks/distributed.py --replicas 2 --rows streamed --out hsdp.json

Muon, with ratios to torch's Muon over the same shards:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --rows muon --tokens 4096,16384

Everything off against torch's CPUOffloadPolicy alone:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --rows everything,CPUOffload --tokens 4096,16384

A trace of rank 0 in one row, and a drawing of one step:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --rows none --tokens 8192 \\
        --trace trace.json --trace-row "streamed, exact" --figure docs/figures/fsdp2-timeline.svg

A row is one optimizer in training: forward, backward, step, zero_grad. fp32 parameters, unless a row says bf16, bf16
compute (under DDP by autocast), full activation checkpointing; gradients are clipped exactly, but not in torch's
offloading row, whose clipping is a pass over the host. `--rows` leaves out rows for which a host has no memory.
`weights` is a sum of the bits of all weights at the end: rows that trained alike to the bit have the same. A time is
the median of the steps after warming up, from one end of the compute stream's work to the next, on the slowest rank;
the host runs ahead. The first step is that of a row's first batch size. The peak is the allocator's, the largest of all
ranks, in GB of 10**9 bytes.

`least` is the ratio that the rates allow, measured on all ranks at once: a step lasts backward, three quarters of the
step without offload or the copies in it, and then the rest of the copies or of the CPU's update, or forward.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from caches import forget_caches
from distributed_rows import TORCHS_MUON, Layout, Row, loss_of, rows
from draw_trace import draw
from machine import machine, print_table
from torch import nn
from torch.distributed.tensor import DTensor
from trace_overlap import REPEATED, record

from reference_impl.device import Device
from reference_impl.memory.rates import CopyRates, host_rate
from reference_impl.verification.model import DecoderShape

WARM_UP = 2


def train(model: nn.Module, optimizer: Any, device: Device, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """Train on `ids` and return this rank's times in seconds, peak in GB (0 on the CPU twin) and losses."""
    marks, losses = [], []
    # A full collection of garbage takes 0.2 s, on one rank after the other, and all wait for each.
    gc.collect()
    gc.freeze()
    for step in range(WARM_UP + steps):
        if step == WARM_UP and device.allocator:
            device.allocator.reset_peak()
        marks.append(device.mark())
        loss = loss_of(model, device, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
    marks.append(device.mark())
    optimizer.synchronize()
    device.synchronize()
    times = [before.seconds_until(after) for before, after in itertools.pairwise(marks)]
    return {
        "first_step_s": times[0],
        "step_s": statistics.median(times[WARM_UP:]),
        "peak_gb": device.allocator.peak_bytes / 1e9 if device.allocator else 0.0,
        "times_s": times,
        "loss": [round(float(loss), 4) for loss in losses],
    }


def measure(
    row: Row, layout: Layout, shape: DecoderShape, device: Device, batches: list[int], tokens: int, steps: int
) -> dict[str, Any]:
    """Build a row once and train it at each batch size; return this rank's measurements, or its error.

    An error that all ranks meet, such as too little memory, ends the row; one of a single rank ends the run.
    """
    try:
        return _measured(row, layout, shape, device, batches, tokens, steps)
    except Exception as error:
        return {"error": repr(error)}


def _measured(
    row: Row, layout: Layout, shape: DecoderShape, device: Device, batches: list[int], tokens: int, steps: int
) -> dict[str, Any]:
    forget_caches(device)
    begun = time.perf_counter()
    threads = torch.get_num_threads()
    if row.torch_offloads:
        # Its AdamW runs on the host, and torchrun allows it one thread.
        torch.set_num_threads(1 if row.has_one_thread else threads_of_a_rank())
    model = row.model(layout, shape, device)
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = row.build(model)
    device.synchronize()
    built_s = time.perf_counter() - begun
    found: dict[str, Any] = {}
    try:
        for batch in batches:
            ids = torch.randint(0, shape.vocab, (batch, tokens), generator=generator)
            found[str(batch * tokens)] = train(model, optimizer, device, ids.to(device.torch_device), steps)
    finally:
        # Also after an error: frozen objects would stay, and the next row needs the memory.
        gc.unfreeze()
        optimizer.close()
        torch.set_num_threads(threads)
    split = getattr(optimizer, "split", None)
    return {
        "build_s": built_s,
        "split": split and list(split),
        "numel": sum(param.numel() for param in params) // layout.shards,
        "weights": sum_of_bits(params),
        "tokens": found,
    }


@torch.no_grad()
def sum_of_bits(params: Iterable[torch.Tensor]) -> int:
    """Return the sum of the bits of this rank's weights, read as whole numbers: the same for the same weights."""
    locals_ = (param.to_local() if isinstance(param, DTensor) else param for param in params)
    integers = {2: torch.int16, 4: torch.int32}
    return sum(int(each.view(integers[each.itemsize]).sum(dtype=torch.int64)) for each in locals_)


def trace(
    row: Row, layout: Layout, shape: DecoderShape, device: Device, batch: int, tokens: int, path: Path
) -> Any:
    """Train a row on every rank; write a trace of rank 0 in its steady state and return its overlap there."""
    forget_caches(device)
    model = row.model(layout, shape, device)
    optimizer = row.build(model)
    ids = torch.randint(0, shape.vocab, (batch, tokens), device=device.torch_device)

    def steps(count: int = 3) -> None:
        for _ in range(count):
            with torch.profiler.record_function(REPEATED):
                loss_of(model, device, ids).backward()
                optimizer.step()
                optimizer.zero_grad()

    steps(WARM_UP)
    try:
        if dist.get_rank() == 0:
            return record(steps, path)
        # Rank 0 records twice, and the others train beside it.
        for _ in range(2):
            steps()
        return None
    finally:
        optimizer.close()


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def base_of(row: str) -> str:
    """Return the row that the ratio of `row` is to."""
    return TORCHS_MUON if row.startswith("muon") else "none"


def summary(name: str, ranks: list[Any], total: str, base_s: float | None) -> dict[str, object]:
    """Return a line of the table for `total` tokens: the slowest rank, the largest peak."""
    errors = [f"rank {number}: {rank['error']}" for number, rank in enumerate(ranks) if "error" in rank]
    if errors:
        return {"row": name, "tokens": total, "error": errors[0]}
    of_size = [rank["tokens"][total] for rank in ranks]
    step_s = max(each["step_s"] for each in of_size)
    return {
        "row": name,
        "tokens": total,
        "step_s": step_s,
        "ratio": step_s / (base_s or step_s),
        "least": "",
        "peak_gb": max(each["peak_gb"] for each in of_size),
        "first_step_s": max(each["first_step_s"] for each in of_size),
        "build_s": max(rank["build_s"] for rank in ranks),
        "split": " ".join(f"{share:.2f}" for share in ranks[0]["split"] or ()),
        "weights": f"{sum(rank['weights'] for rank in ranks) % 2**32:08x}",
        "loss": of_size[0]["loss"][-1],
    }


def threads_of_a_rank() -> int:
    """Return this rank's part of the host's cores."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]), 1)


def rates(device: Device) -> dict[str, object]:
    """Return this machine's name and, on CUDA, the bandwidths of its link and of the host's memory, in GB/s.

    All ranks measure together: they share the host's memory.
    """
    facts = machine(device, begin=dist.barrier)
    if device.is_accelerator:
        threads = torch.get_num_threads()
        torch.set_num_threads(threads_of_a_rank())
        dist.barrier()
        facts["host_gb_per_s"] = round(host_rate(device, 2**29) / 1e9, 1)
        torch.set_num_threads(threads)
    return facts


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--engine", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument("--replicas", type=int, default=1, help="of the shards, under FSDP2 (HSDP)")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--tokens", default="8192,32768", help="tokens a rank and step, comma separated")
    parser.add_argument("--slots-gb", type=float, default=4.0, help="for states that come early, or stay")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, and those that ratios are to"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="slower kernels, for rows whose weights are compared"
    )
    parser.add_argument("--out", type=Path, help="write all numbers of all ranks as JSON")
    parser.add_argument(
        "--trace", type=Path, help="write a Perfetto trace of rank 0 in a row, at the first of --tokens"
    )
    parser.add_argument("--figure", type=Path, help="draw one step of --trace as an SVG")
    parser.add_argument("--trace-row", default="streamed, exact", help="the row's name")
    args = parser.parse_args()
    if args.figure and not args.trace:
        parser.error("--figure draws a trace; expected --trace with it; try --trace trace.json")
    return args


def main() -> None:
    """Run the rows that are asked for; rank 0 prints the table and writes JSON."""
    args = arguments()
    is_cuda = torch.cuda.is_available() and not args.tiny
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    device = Device.of("cuda" if is_cuda else "cpu")
    # Torch's offloading reduces gradients that it keeps on the host there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(minutes=3))
    shape = DecoderShape(
        hidden=args.hidden, ffn=args.ffn, layers=args.layers, heads=args.heads, vocab=args.vocab
    )
    sizes, sequence, slots_bytes = [int(part) for part in args.tokens.split(",")], args.sequence, 10**9
    if args.tiny:
        shape, sizes, sequence = DecoderShape(layers=3), [32, 64], 32
    else:
        slots_bytes = int(args.slots_gb * 1e9)
    is_first = dist.get_rank() == 0
    report: dict[str, Any] = {"machine": of_all_ranks(rates(device)), "shape": vars(shape), "rows": {}}
    report["ranks"] = dist.get_world_size()
    report["arguments"] = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in vars(args).items()
    }
    if is_first:
        print(json.dumps(report["machine"]))
    layout = Layout(args.engine, args.replicas)
    slowest = {
        rate: min(each.get(f"{rate}_gb_per_s", 0) for each in report["machine"]) * 1e9
        for rate in ("d2h", "h2d", "duplex", "host")
    }
    host = slowest.pop("host")
    link = CopyRates(**slowest)
    listed = rows(args.engine, slots_bytes)
    wanted = [part for part in args.rows.split(",") if part]
    asked = [name for name in listed if not wanted or any(part in name for part in wanted)]
    table: list[dict[str, object]] = []
    base: dict[tuple[str, str], float] = {}
    for name in dict.fromkeys(each for row in asked for each in (base_of(row), row)):
        row = listed[name]
        dist.barrier()
        batches = [size // sequence for size in sizes]
        ranks = of_all_ranks(measure(row, layout, shape, device, batches, sequence, args.steps))
        report["rows"][name] = ranks
        for size in sizes:
            base_s = base.get((base_of(name), str(size)))
            line = summary(name, ranks, str(size), base_s)
            if name == base_of(name) and "error" not in line:
                base[name, str(size)] = float(str(line["step_s"]))
            elif row.traffic and link.duplex and base_s and "error" not in line:
                least_s = row.traffic.least_s(base_s, ranks[0]["numel"], slots_bytes, link, host)
                line["least"] = least_s / base_s
            table.append(line)
            if is_first:
                print(json.dumps(line), flush=True)
        if is_first and args.out:
            # After every row, so that a run that is cut short keeps its rows.
            args.out.write_text(json.dumps(report, indent=1))
    if is_first:
        print_table(table)
    if args.trace:
        row = rows(args.engine, slots_bytes)[args.trace_row]
        overlap = trace(row, layout, shape, device, sizes[0] // sequence, sequence, args.trace)
        if is_first:
            print("overlap", overlap)
            if args.figure:
                engine = args.engine.upper()
                draw(args.trace, args.figure, f"{args.trace_row}, {sizes[0]} tokens a rank, {engine}")
    dist.barrier()
    leave()


def leave() -> None:
    """End this rank at once.

    Torch's caches keep gloo's threads beyond `destroy_process_group`. One that frees a tensor while Python finalizes
    aborts the process ("terminate called without an active exception", pytorch/pytorch issue 190489).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
