"""Optimizer offload under FSDP2 or DDP against no offload and torch's CPUOffloadPolicy, all rows in one process group.

Two GPUs of 80 GB and 150 GB of host memory, under five minutes; 1.5e9 parameters a rank:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --out distributed.json

Four GPUs, the 6.1e9 parameters of docs/distributed.md:

    torchrun --standalone --nproc-per-node 4 benchmarks/distributed.py --layers 52 --tokens 4096,16384 --out four.json

DDP on two GPUs of 141 GB, with 150 GB of host memory; each rank has all 3.1e9 parameters and their states:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --engine ddp --tokens 32768 --out ddp.json

The same code at toy size, on any machine:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --tiny [--engine ddp]

Everything off against torch's CPUOffloadPolicy alone:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --rows everything,CPUOffload --tokens 4096,16384

A trace of rank 0 in one row, and a drawing of one step:

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --rows none --tokens 8192 \\
        --trace trace.json --trace-row "streamed, exact" --figure docs/figures/fsdp2-timeline.svg

A row is one optimizer in training: forward, backward, step, zero_grad. fp32 parameters, unless a row says bf16, bf16
compute (under DDP by autocast), full activation checkpointing; gradients are clipped exactly, but not in torch's
offloading row, whose clipping is a pass over the host. `--rows` leaves out what a host has no memory for.
A time is the median of the steps after warming up, from one end of the compute stream's work to the next, on the
slowest rank; the host runs ahead. The peak is the allocator's, the largest of all ranks, in GB of 10**9 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from caches import forget_caches
from draw_trace import draw
from machine import machine, print_table
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trace_overlap import REPEATED, record

from reference_impl import HybridDeviceOptimizer, ShardStreamer, Streaming
from reference_impl.device import Device
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0
WARM_UP = 2
# Of states, where the peak counts.
CHUNK_BYTES = 32 * 2**20


class Plain:
    """Torch's fused AdamW, clipped by torch."""

    def __init__(self, model: nn.Module, *, clips: bool) -> None:
        self._params = list(model.parameters())
        self._clips = clips
        self._inner = torch.optim.AdamW(self._params, fused=True, **OPTIONS)
        self.zero_grad = self._inner.zero_grad

    def step(self) -> None:
        """Clip, then update."""
        if self._clips:
            nn.utils.clip_grad_norm_(self._params, MAX_NORM)
        self._inner.step()

    def synchronize(self) -> None:
        """Do nothing: it returns finished."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


@dataclass(frozen=True)
class Row:
    """How an optimizer is built, whether FSDP2 keeps the shards on the host, and in which dtype."""

    build: Callable[[nn.Module], Any]
    torch_offloads: bool = False
    dtype: torch.dtype = torch.float32

    def model(self, engine: str, shape: DecoderShape, device: Device) -> nn.Module:
        """Return the model that the row trains."""
        if engine == "ddp":
            return replicated(shape, device)
        return sharded(shape, device, torch_offloads=self.torch_offloads, dtype=self.dtype)


def ours(**options: Any) -> Row:
    """Return a row of our optimizer, attached and clipping exactly."""

    def build(model: nn.Module) -> HybridDeviceOptimizer:
        optimizer = HybridDeviceOptimizer(
            model.parameters(), max_grad_norm=MAX_NORM, backward_overlap="gradients", **OPTIONS, **options
        )
        optimizer.attach(model)
        return optimizer

    return Row(build)


class EverythingOff:
    """Our streamer of shards, with its optimizer."""

    def __init__(self, model: nn.Module, streaming: Streaming) -> None:
        inner = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        streamer = ShardStreamer(model, inner, max_grad_norm=MAX_NORM, streaming=streaming)
        self.step = streamer.optimizer.step
        self.zero_grad = streamer.optimizer.zero_grad
        self.synchronize = streamer.optimizer.synchronize
        self.close = streamer.close


def rows(engine: str, slots_bytes: int) -> dict[str, Row]:
    """Return every row of the table by name; states may come in early into `slots_bytes`."""
    exact = Streaming(prefetch_bytes=slots_bytes)
    both = {
        "none": Row(lambda model: Plain(model, clips=True)),
        "streamed, exact": ours(split=(0.0, 1.0, 0.0), streaming=exact),
        "streamed, bf16 moments": ours(
            split=(0.0, 1.0, 0.0),
            streaming=Streaming(prefetch_bytes=slots_bytes, moments_dtype=torch.bfloat16),
        ),
        "on the CPU": ours(split=(0.0, 0.0, 1.0)),
    }
    if engine == "ddp":
        return both
    packed = Streaming(prefetch_bytes=slots_bytes, hi_lo_masters=True, moments_dtype=torch.bfloat16)
    return both | {
        "bf16 shards, half masters, bf16 moments": replace(
            ours(split=(0.0, 1.0, 0.0), streaming=packed), dtype=torch.bfloat16
        ),
        "auto": ours(split="auto", streaming=exact),
        "everything off, exact": Row(lambda model: EverythingOff(model, Streaming(chunk_bytes=CHUNK_BYTES))),
        "everything off, bf16 moments": Row(
            lambda model: EverythingOff(
                model, Streaming(chunk_bytes=CHUNK_BYTES, moments_dtype=torch.bfloat16)
            )
        ),
        "CPUOffloadPolicy, unclipped": Row(lambda model: Plain(model, clips=False), torch_offloads=True),
    }


def sharded(shape: DecoderShape, device: Device, *, torch_offloads: bool, dtype: torch.dtype) -> nn.Module:
    """Return a decoder with the same weights in every row, rounded to `dtype`; no rank ever holds all of them."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.torch_device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if torch_offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.pins_host_memory)
    for index, layer in enumerate(model.layers):
        model.layers[index] = fully_shard(checkpoint_wrapper(layer), **options)
    fully_shard(model.embedding, **options)
    fully_shard([model.norm, model.head], **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if torch_offloads else device.torch_device)
    fill(model, device)
    return model


def replicated(shape: DecoderShape, device: Device) -> nn.Module:
    """Return a decoder under DDP, which brings all ranks the weights of the first."""
    with torch.device("meta"):
        model = Decoder(shape)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    model.to_empty(device=device.torch_device)
    fill(model, device)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fill(model: nn.Module, device: Device) -> None:
    """Give a model on `device`, or this rank's shards of it, the weights that every row begins with."""
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            if param.ndim > 1:
                local.copy_(0.02 * torch.randn(local.shape, device=device.torch_device))
            else:
                local.fill_(1)


def loss_of(model: nn.Module, device: Device, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch, computed in bf16: FSDP2 casts by itself."""
    is_replicated = isinstance(model, DistributedDataParallel)
    with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=is_replicated):
        return decoder_loss(model(ids), ids)


def train(model: nn.Module, optimizer: Any, device: Device, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """Train on `ids` and return this rank's times in seconds, peak in GB (0 on the CPU twin) and losses."""
    marks, losses = [], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP and device.allocator:
            device.allocator.reset_peak()
        if step >= WARM_UP:
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
        "step_s": statistics.median(times),
        "peak_gb": device.allocator.peak_bytes / 1e9 if device.allocator else 0.0,
        "times_s": times,
        "loss": [round(float(loss), 4) for loss in losses],
    }


def measure(
    row: Row, engine: str, shape: DecoderShape, device: Device, batches: list[int], tokens: int, steps: int
) -> dict[str, Any]:
    """Build a row once and train it at each batch size; return what this rank has measured, or its error.

    An error that all ranks meet, such as too little memory, ends the row; one of a single rank ends the run.
    """
    try:
        return _measured(row, engine, shape, device, batches, tokens, steps)
    except Exception as error:
        return {"error": repr(error)}


def _measured(
    row: Row, engine: str, shape: DecoderShape, device: Device, batches: list[int], tokens: int, steps: int
) -> dict[str, Any]:
    forget_caches(device)
    begun = time.perf_counter()
    threads = torch.get_num_threads()
    if row.torch_offloads:
        # Its AdamW runs on the host, and torchrun allows it one thread.
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ranks, 1))
    model = row.model(engine, shape, device)
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
        optimizer.close()
        torch.set_num_threads(threads)
    split = getattr(optimizer, "split", None)
    return {"build_s": built_s, "split": split and list(split), "tokens": found}


def trace(
    row: Row, engine: str, shape: DecoderShape, device: Device, batch: int, tokens: int, path: Path
) -> Any:
    """Train a row on every rank; write a trace of rank 0 in its steady state and return its overlap there."""
    forget_caches(device)
    model = row.model(engine, shape, device)
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
    """Return what each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def summary(name: str, ranks: list[Any], total: str, base: float | None) -> dict[str, object]:
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
        "ratio": step_s / (base or step_s),
        "peak_gb": max(each["peak_gb"] for each in of_size),
        "build_s": max(rank["build_s"] for rank in ranks),
        "split": " ".join(f"{share:.2f}" for share in ranks[0]["split"] or ()),
        "loss": of_size[0]["loss"][-1],
    }


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--engine", choices=["fsdp2", "ddp"], default="fsdp2")
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of one sequence")
    parser.add_argument("--tokens", default="8192,32768", help="tokens a rank and step, comma separated")
    parser.add_argument("--slots-gb", type=float, default=4.0, help="for states that come in during backward")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these; none is first"
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
    device = Device.of("cuda" if is_cuda else "cpu")
    # Torch's offloading reduces on the host what it keeps there.
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
    # All ranks at once: they share the host's memory.
    report: dict[str, Any] = {"machine": of_all_ranks(machine(device)), "shape": vars(shape), "rows": {}}
    report["ranks"] = dist.get_world_size()
    report["arguments"] = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in vars(args).items()
    }
    if is_first:
        print(json.dumps(report["machine"]))
    wanted = [part for part in args.rows.split(",") if part]
    table: list[dict[str, object]] = []
    base: dict[str, float] = {}
    for name, row in rows(args.engine, slots_bytes).items():
        if wanted and name != "none" and not any(part in name for part in wanted):
            continue
        dist.barrier()
        batches = [size // sequence for size in sizes]
        ranks = of_all_ranks(measure(row, args.engine, shape, device, batches, sequence, args.steps))
        report["rows"][name] = ranks
        for size in sizes:
            line = summary(name, ranks, str(size), base.get(str(size)))
            if name == "none" and "error" not in line:
                base[str(size)] = float(str(line["step_s"]))
            table.append(line)
            if is_first:
                print(json.dumps(line), flush=True)
        if is_first and args.out:
            # After every row, so that a run that is cut short has what it had.
            args.out.write_text(json.dumps(report, indent=1))
    if is_first:
        print_table(table)
    if args.trace:
        row = rows(args.engine, slots_bytes)[args.trace_row]
        overlap = trace(row, args.engine, shape, device, sizes[0] // sequence, sequence, args.trace)
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
