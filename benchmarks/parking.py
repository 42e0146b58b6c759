# SPDX-License-Identifier: Apache-2.0
"""Parking against per-tensor copies and against the link: how long training memory takes away from the GPU and back.

    python benchmarks/parking.py --out parking.json          # the published model, needs a large GPU
    python benchmarks/parking.py --rounds 50                  # another process takes the freed memory each time
    python benchmarks/parking.py --tiny                       # the same code at toy size, also on the CPU twin
    python benchmarks/parking.py --peer torch_memory_saver    # pip install torch_memory_saver, or its wheel unpacked
    python benchmarks/parking.py --only shared --rounds 50    # one part, with the allocator's segments as they are

A row is one way for all of training memory, in bf16 weights and gradients with fp32 masters and moments of torch's
AdamW, or with our optimizer. `away` and `back` are seconds from the synchronized device to the synchronized device,
divided by the time that one pinned copy of as many bytes takes on this link, which is measured in the same run. Between
the two lie `--pause-s`, as a generation does: the driver clears memory that it has taken back, and copies into it wait
until then. `left` is the GPU memory that the process still has beyond its context. Per-tensor copies are the way of
trainers. A second process measures the same rows with the allocator's `expandable_segments`, unless this one has them.
A row is printed as soon as it is there. torch_memory_saver keeps addresses and leaves out the allocator: its tensors
are made in a pool of its own, here by its `hook_mode="torch"`, which needs no LD_PRELOAD. Its wheel (0.0.10: 2.6 MB,
any Python from 3.9, CUDA 12 and 13) works unpacked in a folder of PYTHONPATH. It has a process of its own, twice:
`resume()` gives the pinned memory back unless `retain_cpu_backup` is set, and a call that frees its memory outside of
its region ends the process (`tms_torch_free`). A peer that does not end within `--peer-limit-s` is stopped, and the row
names its call.
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
from dataclasses import replace
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
PARTS = ("rows", "shared", "peer")

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


def memory_saver(tensors: list[torch.Tensor], *, retain: bool) -> tuple[Move, Move]:
    """Move `tensors` into a pool of torch_memory_saver that copies to the host; return its pause and its resume."""
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    saver.retain_cpu_backup = retain
    with saver.region(enable_cpu_backup=True):
        for tensor in tensors:
            tensor.data = tensor.data.clone()
    torch.cuda.empty_cache()
    return saver.pause, saver.resume


def be_the_peer(connection: Connection, shape: DecoderShape, retain: bool, pause_s: float) -> None:
    """Be torch_memory_saver's process: send the name of each call in front of it, and its seconds behind it."""
    device = Device.available()
    training(device, TINY)
    torch.cuda.empty_cache()
    context_bytes = used_bytes(device)
    model, beside, step = training(device, shape)

    def tell(name: str, move: Callable[[], Any]) -> Any:
        connection.send(name)
        device.synchronize()
        start = time.perf_counter()
        result = move()
        device.synchronize()
        connection.send(time.perf_counter() - start)
        return result

    pause, resume = tell("region", lambda: memory_saver(tensors_of(model, beside), retain=retain))
    for _ in range(TIMES):
        tell("pause", pause)
        connection.send(used_bytes(device) - context_bytes)
        time.sleep(pause_s)
        tell("resume", resume)
    tell("step", step)
    connection.send(None)
    connection.close()
    # At its end the interpreter would free the pool, outside of the region.
    os._exit(0)


def peer_row(
    shape: DecoderShape,
    size_bytes: int,
    links: tuple[float, float],
    *,
    retain: bool,
    pause_s: float,
    limit_s: float,
) -> dict[str, Any]:
    """Return torch_memory_saver's row, as far as it has come within `limit_s`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    peer = spawn.Process(target=be_the_peer, args=(theirs, shape, retain, pause_s), daemon=True)
    peer.start()
    theirs.close()
    calls: list[tuple[str, float]] = []
    name, left_bytes, ended = "start", 0, f"did not end in {limit_s:g} s: "
    deadline_s = time.monotonic() + limit_s
    try:
        while ours.poll(max(0.0, deadline_s - time.monotonic())):
            said = ours.recv()
            if said is None:
                ended = ""
                break
            if isinstance(said, str):
                name = said
            elif isinstance(said, int):
                left_bytes = said
            else:
                calls.append((name, said))
    except EOFError:
        peer.join(5)
        ended = f"its process ended with {peer.exitcode}: "
    peer.kill()
    peer.join()
    if ended:
        ended += (
            f"in {name}, behind {', '.join(f'{call} {took_s:.2f} s' for call, took_s in calls) or 'none'}"
        )
    went, came = ([took_s for call, took_s in calls if call == each] for each in ("pause", "resume"))
    found: dict[str, Any] = {"gb": size_bytes / GB, "left GB": left_bytes / GB, "ended": ended}
    for way, times_s, rate in (("away", went, links[0]), ("back", came, links[1])):
        if times_s:
            found[f"first {way} s"] = times_s[0]
        if times_s[1:]:
            later_s = statistics.median(times_s[1:])
            found |= {f"{way} s": later_s, f"{way} / link": later_s / (size_bytes / GB / rate)}
    return found


def timed(device: Device, move: Move) -> float:
    """Return the seconds that a call takes, work on the device included."""
    device.synchronize()
    start = time.perf_counter()
    move()
    device.synchronize()
    return time.perf_counter() - start


def used_bytes(device: Device) -> int:
    """Return the bytes of the device's memory that are taken, by anybody."""
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
    pause_s: float,
    times_wanted: int = TIMES,
) -> dict[str, Any]:
    """Time the first and the later times away and back, as multiples of the time of the links (GB/s out, in)."""
    times: list[tuple[float, float]] = []
    left_bytes = 0
    for _ in range(times_wanted):
        went_s = timed(device, away)
        left_bytes = used_bytes(device) - context_bytes
        time.sleep(pause_s)
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
    """Park, let another process take everything, restore, train; return the times and the growth of memory."""
    model, beside, step = training(device, shape)
    parked = park(model, beside.optimizer)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=take_all, args=(theirs,), daemon=True)
    other.start()
    took, used, losses, times = [], [], [], []
    for number in range(1, rounds + 1):
        with parked:
            ours.send(True)
            took.append(ours.recv())
        times.append((parked.report.park_s, parked.report.restore_s))
        losses.append(step())
        used.append(used_bytes(device))
        if number % 10 == 0:
            print(
                f"{number} rounds, {(used[-1] - used[0]) / GB:.3f} GB more than behind the first", flush=True
            )
    size_bytes = sum(parked.report.parked_bytes.values())
    ours.send(False)
    other.join()
    parked.close()
    away_s, back_s = zip(*times, strict=True)
    return {
        "rounds": rounds,
        "gb": size_bytes / GB,
        "away s": statistics.median(away_s),
        "back s": statistics.median(back_s),
        "slowest s": max(away_s[1:]) + max(back_s[1:]),
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


class Rows:
    """The rows of this process, each printed as soon as it is there."""

    def __init__(
        self, device: Device, context_bytes: int, links: tuple[float, float], *, pause_s: float
    ) -> None:
        self.found: dict[str, Any] = {}
        self._device, self._context_bytes, self._links = device, context_bytes, links
        self._pause_s = pause_s

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Note a row that is measured."""
        self.found[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)

    def measure(
        self, name: str, away: Move, back: Move, size_bytes: int, *, times_wanted: int = TIMES
    ) -> None:
        """Measure a row of the ways `away` and `back`."""
        result = row(
            self._device,
            self._context_bytes,
            away,
            back,
            size_bytes,
            self._links,
            pause_s=self._pause_s,
            times_wanted=times_wanted,
        )
        self.add(name, result)


def measure_torchs(device: Device, shape: DecoderShape, rows: Rows, *, peers: bool) -> None:
    """Measure the rows of torch's AdamW."""
    model, beside, step = training(device, shape)
    if peers:
        ways = per_tensor(device, tensors_of(model, beside))
        # It takes half a minute.
        rows.measure("a tensor at a time", *ways, size_of(model, beside), times_wanted=2)
    for name in ("park()", "park(), prepared a step before"):
        parked = park(model, beside.optimizer)
        if "prepared" in name:
            parked.prepare()
            step()
        rows.measure(name, parked.park, parked.restore, size_of(model, beside))
        rows.found[name]["host / bytes"] = parked.report.host_bytes / size_of(model, beside)
        parked.close()


def measure_ours(device: Device, shape: DecoderShape, rows: Rows) -> None:
    """Measure the row of our optimizer, whose states are on the host."""
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
        rows.measure("park(), states on the host already", parked.park, parked.restore, size_bytes)
        parked.close()


def size_of(model: torch.nn.Module, beside: MastersBeside) -> int:
    """Return the bytes of training memory."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(model, beside))


def main() -> None:
    """Measure all rows, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--layers", type=int, help="fewer layers than the published model has")
    parser.add_argument("--no-peers", action="store_true", help="leave out copies a tensor at a time")
    parser.add_argument("--peer", choices=["torch_memory_saver"], help="also time another library, on a GPU")
    parser.add_argument("--peer-limit-s", type=float, default=120.0, help="stop it behind so many seconds")
    parser.add_argument(
        "--rounds", type=int, default=0, help="also share the GPU with another process, so often"
    )
    parser.add_argument("--only", choices=PARTS, help="measure this part alone, in this process")
    parser.add_argument("--pause-s", type=float, default=0.5, help="wait so long between away and back")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    device = Device.available()
    if args.peer and not device.is_accelerator:
        parser.error(f"--peer {args.peer} got no GPU; expected one; try without it")
    shape = TINY if args.tiny else PUBLISHED
    if args.layers:
        shape = replace(shape, layers=args.layers)
    parts = {args.only} if args.only else {*PARTS}
    # The context, and the kernels and libraries that training loads into it.
    training(device, TINY)
    gc.collect()
    if device.is_accelerator:
        torch.cuda.empty_cache()
    context_bytes = used_bytes(device)
    # Rounds need no link.
    facts: dict[str, Any] = {} if args.only == "shared" else machine(device)
    print(json.dumps(facts), flush=True)
    if device.is_accelerator:
        torch.cuda.empty_cache()
    links = (float(facts.get("d2h_gb_per_s", 1.0)), float(facts.get("h2d_gb_per_s", 1.0)))
    rows = Rows(device, context_bytes, links, pause_s=args.pause_s)
    report: dict[str, Any] = {"machine": facts, "shape": vars(shape), "rows": rows.found, "shared": {}}

    if "rows" in parts:
        measure_torchs(device, shape, rows, peers=not args.no_peers)
        measure_ours(device, shape, rows)
    if "shared" in parts and args.rounds and device.is_accelerator:
        report["shared"]["park()"] = shared = rounds_with_another(device, shape, args.rounds)
        print(f"shared with another process: {json.dumps(shared)}", flush=True)
    gc.collect()
    if device.allocator is not None:
        device.allocator.give_back()
        if not args.only and not device.allocator.segments_grow:
            arguments = ["--tiny"] if args.tiny else ["--layers", str(shape.layers)]
            arguments += ["--rounds", str(args.rounds), "--pause-s", str(args.pause_s)]
            other = report_with_growing_segments(arguments)
            for part in ("rows", "shared"):
                report[part] |= {f"{name}, expandable_segments": each for name, each in other[part].items()}
    if "peer" in parts and args.peer:
        with torch.device("meta"):
            # bf16 weights and gradients, fp32 masters and two moments.
            size_bytes = 16 * sum(param.numel() for param in Decoder(shape).parameters())
        for retain in (True, False):
            name = f"{args.peer}, {'host memory kept' if retain else 'as it comes'}"
            limits = {"pause_s": args.pause_s, "limit_s": args.peer_limit_s}
            rows.add(name, peer_row(shape, size_bytes, links, retain=retain, **limits))
    if rows.found:
        print_table([{"row": name, **result} for name, result in rows.found.items()])
    for name, shared in report["shared"].items():
        print(f"\n{name}, shared with another process: {json.dumps(shared)}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
