"""Parking against per-tensor copies and against the link: how long training memory takes away from the GPU and back.

    python benchmarks/parking.py --out parking.json          # the published model, needs a large GPU
    python benchmarks/parking.py --rounds 50                  # another process takes the freed memory each time
    python benchmarks/parking.py --tiny                       # the same code at toy size, also on the CPU twin
    python benchmarks/parking.py --peer torch_memory_saver    # pip install torch_memory_saver, or its wheel unpacked

A row is one way for all of training memory, in bf16 weights and gradients with fp32 masters and moments of torch's
AdamW, or with our optimizer. `away` and `back` are seconds from the synchronized device to the synchronized device,
divided by the time that one pinned copy of as many bytes takes on this link, which is measured in the same run. `left`
is what the process still has of the GPU's memory beyond its context. Per-tensor copies are what trainers do. A second
process measures the same rows with the allocator's `expandable_segments`, unless this one has them.
torch_memory_saver keeps addresses and leaves out the allocator: its tensors are made in a pool of its own, here by its
`hook_mode="torch"`, which needs no LD_PRELOAD. Its wheel (0.0.10: 2.6 MB, any Python from 3.9, CUDA 12 and 13) works
unpacked in a folder of PYTHONPATH.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import machine, print_table

from reference_impl import HybridDeviceOptimizer, park
from reference_impl.device import Device
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

PUBLISHED = DecoderShape(hidden=2048, ffn=5632, layers=24, heads=16, vocab=32000)
TINY = DecoderShape(hidden=64, ffn=176, layers=3, heads=4, vocab=256)
TIMES = 4
GB = 10**9

Move = Callable[[], object]


class MastersBeside:
    """Torch's AdamW over fp32 masters of a bf16 model, as trainers write it; `params` are the masters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = [param.detach().float().requires_grad_() for param in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=True)
        self._model = model

    @torch.no_grad()
    def step(self) -> None:
        """Update masters with the model's gradients, and round them to its weights."""
        for param, master in zip(self._model.parameters(), self.params, strict=True):
            master.grad = param.grad.float() if param.grad is not None else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_([*self._model.parameters()], self.params)


def training(
    device: Device, shape: DecoderShape
) -> tuple[torch.nn.Module, MastersBeside, Callable[[], float]]:
    """Return a model that has taken a step, its masters, and a step."""
    torch.manual_seed(0)
    model = Decoder(shape).to(device.torch_device, torch.bfloat16)
    beside = MastersBeside(model)
    ids = torch.randint(shape.vocab, (1, 256)).to(device.torch_device)

    def step() -> float:
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        beside.step()
        return loss.item()

    step()
    return model, beside, step


def tensors_of(model: torch.nn.Module, beside: MastersBeside) -> list[torch.Tensor]:
    """Return every tensor of training memory."""
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    states = [value for state in beside.optimizer.state.values() for value in state.values() if value.ndim]
    return [*model.parameters(), *gradients, *beside.params, *states]


def per_tensor(device: Device, tensors: list[torch.Tensor]) -> tuple[Move, Move]:
    """Return the way of most trainers: `.to("cpu")` and back, a tensor at a time."""

    def away() -> None:
        for tensor in tensors:
            # On the twin `.to` would be the same tensor.
            tensor.data = tensor.data.to("cpu", copy=True)
        if device.is_accelerator:
            torch.cuda.empty_cache()

    def back() -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(device.torch_device, copy=True)

    return away, back


def memory_saver(tensors: list[torch.Tensor]) -> tuple[Move, Move]:
    """Move `tensors` into a pool of torch_memory_saver that copies to the host; return its pause and its resume."""
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    with saver.region(enable_cpu_backup=True):
        for tensor in tensors:
            tensor.data = tensor.data.clone()
    torch.cuda.empty_cache()
    return saver.pause, saver.resume


def timed(device: Device, move: Move) -> float:
    """Return the seconds that a call takes, work on the device included."""
    device.synchronize()
    start = time.perf_counter()
    move()
    device.synchronize()
    return time.perf_counter() - start


def used_bytes(device: Device) -> int:
    """Return what of the device's memory is taken, by anybody."""
    if not device.is_accelerator:
        return 0
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return total - free


def row(
    device: Device,
    context_bytes: int,
    away: Move,
    back: Move,
    size_bytes: int,
    links: tuple[float, float],
    *,
    times_wanted: int = TIMES,
) -> dict[str, Any]:
    """Time the first and the later times away and back, as multiples of the time of the links (GB/s out, in)."""
    times: list[tuple[float, float]] = []
    left_bytes = 0
    for _ in range(times_wanted):
        went_s = timed(device, away)
        left_bytes = used_bytes(device) - context_bytes
        times.append((went_s, timed(device, back)))
    link_s = [size_bytes / GB / rate for rate in links]
    later = [statistics.median(each) for each in zip(*times[1:], strict=True)]
    return {
        "gb": size_bytes / GB,
        "first away s": times[0][0],
        "first back s": times[0][1],
        "away s": later[0],
        "back s": later[1],
        "away / link": later[0] / link_s[0],
        "back / link": later[1] / link_s[1],
        "left GB": left_bytes / GB,
    }


def take_all(connection: Connection, index: int = 0) -> None:
    """Be the other process on GPU `index`: whenever asked, take all memory that is free, write it, and give it back."""
    torch.cuda.set_device(index)
    while connection.recv():
        free, _ = torch.cuda.mem_get_info()
        taken = torch.full((free - 2**28,), 7, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        took_bytes = taken.numel()
        del taken
        torch.cuda.empty_cache()
        connection.send(took_bytes)


def rounds_with_another(device: Device, shape: DecoderShape, rounds: int) -> dict[str, Any]:
    """Park, let another process take everything, restore, train; return what it took and what grew."""
    model, beside, step = training(device, shape)
    parked = park(model, beside.optimizer)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=take_all, args=(theirs,), daemon=True)
    other.start()
    took, used, losses = [], [], []
    for _ in range(rounds):
        with parked:
            ours.send(True)
            took.append(ours.recv())
        losses.append(step())
        used.append(used_bytes(device))
    ours.send(False)
    other.join()
    parked.close()
    return {
        "rounds": rounds,
        "least taken GB": min(took) / GB,
        "growth GB": (used[-1] - used[1]) / GB,
        "losses fall": losses[-1] < losses[0],
    }


def report_with_growing_segments(arguments: list[str]) -> dict[str, Any]:
    """Run this benchmark in a process whose allocator has `expandable_segments`; return its report."""
    growing = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, __file__, *arguments, "--no-peers", "--out", str(out)],
            env={**os.environ, **growing},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        report: dict[str, Any] = json.loads(out.read_text())
    return report


def main() -> None:
    """Measure all rows, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--no-peers", action="store_true", help="leave out copies a tensor at a time")
    parser.add_argument("--peer", choices=["torch_memory_saver"], help="also time another library, on a GPU")
    parser.add_argument(
        "--rounds", type=int, default=0, help="also share the GPU with another process, so often"
    )
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    device = Device.available()
    if args.peer and not device.is_accelerator:
        parser.error(f"--peer {args.peer} got no GPU; expected one; try without it")
    shape = TINY if args.tiny else PUBLISHED
    # The context, and the kernels and libraries that training loads into it.
    training(device, TINY)
    gc.collect()
    if device.is_accelerator:
        torch.cuda.empty_cache()
    context_bytes = used_bytes(device)
    facts: dict[str, Any] = machine(device)
    print(json.dumps(facts))
    if device.is_accelerator:
        torch.cuda.empty_cache()
    links = (float(facts.get("d2h_gb_per_s", 1.0)), float(facts.get("h2d_gb_per_s", 1.0)))
    rows: dict[str, Any] = {}

    model, beside, step = training(device, shape)
    parked = park(model, beside.optimizer)
    parked.park()
    size_bytes = sum(parked.report.parked_bytes.values())
    parked.close()
    if not args.no_peers:
        rows["a tensor at a time"] = row(
            device,
            context_bytes,
            *per_tensor(device, tensors_of(model, beside)),
            size_bytes,
            links,
            # It takes half a minute.
            times_wanted=2,
        )
    parked = park(model, beside.optimizer)
    rows["park()"] = row(device, context_bytes, parked.park, parked.restore, size_bytes, links)
    rows["park()"]["host / bytes"] = parked.report.host_bytes / size_bytes
    parked.close()
    parked = park(model, beside.optimizer)
    parked.prepare()
    step()
    rows["park(), prepared a step before"] = row(
        device, context_bytes, parked.park, parked.restore, size_bytes, links
    )
    parked.close()
    if args.peer:
        rows[args.peer] = row(
            device, context_bytes, *memory_saver(tensors_of(model, beside)), size_bytes, links
        )
        # It trains on.
        step()
    del model, beside, parked, step

    torch.manual_seed(0)
    model = Decoder(shape).to(device.torch_device, torch.bfloat16)
    with HybridDeviceOptimizer(model.parameters(), lr=1e-4, offload_fraction=1.0) as optimizer:
        optimizer.attach(model)
        ids = torch.randint(shape.vocab, (1, 256)).to(device.torch_device)
        decoder_loss(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        parked = park(model, optimizer)
        parked.park()
        size_bytes = sum(parked.report.parked_bytes.values())
        parked.restore()
        rows["park(), states on the host already"] = row(
            device, context_bytes, parked.park, parked.restore, size_bytes, links
        )
        parked.close()
    del model, optimizer, parked
    report: dict[str, Any] = {"machine": facts, "shape": vars(shape), "rows": rows, "shared": {}}
    if args.rounds and device.is_accelerator:
        report["shared"]["park()"] = rounds_with_another(device, shape, args.rounds)
    if device.allocator is not None and not device.allocator.segments_grow:
        gc.collect()
        device.allocator.give_back()
        arguments = ["--tiny"] if args.tiny else []
        other = report_with_growing_segments([*arguments, "--rounds", str(args.rounds)])
        for part in ("rows", "shared"):
            report[part] |= {f"{name}, expandable_segments": each for name, each in other[part].items()}
    print_table([{"row": name, **result} for name, result in rows.items()])
    for name, shared in report["shared"].items():
        print(f"\n{name}, shared with another process: {json.dumps(shared)}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
