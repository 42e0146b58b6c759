# SPDX-License-Identifier: Apache-2.0
"""Optimizer offload against its peers, in one process, as ratios to the step that offloads nothing.

    python benchmarks/optimizer.py --out optimizer.json            # the published model, needs a large GPU
    python benchmarks/optimizer.py --tiny                          # the same code at toy size, also on the CPU twin
    python benchmarks/optimizer.py --rows streamed --trace trace.json --trace-row "8 GB"  # with a Perfetto trace
    python benchmarks/optimizer.py --rows muon --out muon.json     # Muon for the matrices, ratios to Muon on the GPU
    python benchmarks/optimizer.py --rows none --tokens 8192 --trace trace.json --figure timeline.svg  # one step, drawn

A row is one optimizer in training: forward, backward, step, zero_grad. Times are medians of steps 3 to 6, from one end
of the compute stream's work to the next: copies that should hide behind the next forward and do not are paid there.
Peaks are the allocator's: of steps from the second on, and of the calls of `step()` in them, without memory that rows
before have left on the GPU. Peers are imported if they are installed, and left out otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import muon_rows
import torch
from caches import forget_caches
from cpu_lane import add_lane, watched_updates
from draw_trace import draw
from machine import machine, print_table
from torch import nn
from trace_overlap import REPEATED, record

from offload_arithmetic.sizes import STATE_CHUNK_BYTES
from offload_arithmetic.states import state_bytes
from offload_arithmetic.update_time import whole_update_seconds
from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, Streaming, limit_pinned_memory
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger, device_bytes
from reference_impl.optimizers.auto_split import machine_rates
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss
from skill_tools.units import parse_bytes

PUBLISHED = DecoderShape(hidden=2048, ffn=5632, layers=24, heads=16, vocab=32000)
TINY = DecoderShape(hidden=64, ffn=176, layers=3, heads=4, vocab=256)
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARM_UP, MEASURED = 2, 4
GB = 10**9
BORROWED = 5 * GB // 2

Build = Callable[[nn.Module], Any]


def nothing_offloaded(model: nn.Module) -> Any:
    """Keep fp32 masters and states on the GPU: the reference of every ratio."""
    return HybridDeviceOptimizer(model.parameters(), offload_fraction=0.0, **OPTIONS)


def ours(fraction: float, **options: Any) -> Build:
    """Return a builder of our optimizer, attached."""

    def build(model: nn.Module) -> HybridDeviceOptimizer:
        optimizer = HybridDeviceOptimizer(model.parameters(), offload_fraction=fraction, **OPTIONS, **options)
        optimizer.attach(model)
        return optimizer

    return build


def streamed(**options: Any) -> Build:
    """Return a builder of AdamW whose states stream through the GPU, attached."""

    def build(model: nn.Module) -> OptimizerStateOffloader:
        inner = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        optimizer = OptimizerStateOffloader(inner, **options)
        optimizer.attach(model)
        return optimizer

    return build


def torchao_offload(model: nn.Module) -> Any:
    """Build torchao's CPUOffloadOptimizer with gradients offloaded: bf16 states, other numerics."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **OPTIONS
    )


def megatron_offload(fraction: float) -> Build:
    """Return a builder of Megatron-Core's HybridDeviceOptimizer, overlapped, with fp32 masters."""

    def build(model: nn.Module) -> Any:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Theirs

        return Theirs(
            list(model.parameters()),
            offload_fraction=fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            fused=True,
            **OPTIONS,
        )

    return build


def rows() -> dict[str, Build]:
    """Return every row of the table by name."""
    table: dict[str, Build] = {"none": nothing_offloaded}
    for fraction in (0.25, 0.5, 1.0):
        table[f"ours {fraction:.0%}"] = ours(fraction, backward_overlap="update")
    table["ours 100% exact clipping"] = ours(1.0, max_grad_norm=1.0)
    forms: dict[str, dict[str, Any]] = {"": {}, ", bf16 moments": {"states": "bf16-moments"}}
    for name, form in forms.items():
        clipped = {"max_grad_norm": 1.0, **form}
        table[f"streamed 100% exact clipping{name}"] = streamed(**clipped)
        table[f"streamed 100% exact clipping{name}, 8 GB borrowed"] = streamed(
            device_budget_bytes=8 * GB, **clipped
        )
        streaming = Streaming(prefetch_bytes=8 * GB, **form)
        table[f"auto split exact clipping{name}"] = ours(
            1.0, split="auto", streaming=streaming, max_grad_norm=1.0
        )
    for low_bits in (8, 16):
        compact = {"max_grad_norm": 1.0, "states": f"compact-{low_bits}"}
        name = f"streamed 100% exact clipping, compact with {low_bits} low bits"
        table[name] = streamed(**compact)
        # The budget has the three slots too, which are no loan.
        table[f"{name}, 2.5 GB borrowed"] = streamed(
            device_budget_bytes=BORROWED + 3 * STATE_CHUNK_BYTES, **compact
        )
    # The splits between which auto chooses: is its choice the best?
    for cpu in (0.1, 0.3, 0.4):
        split = (0.0, 1 - cpu, cpu)
        table[f"split 0/{1 - cpu:.0%}/{cpu:.0%} exact clipping"] = ours(
            1.0, split=split, streaming=Streaming(prefetch_bytes=8 * GB), max_grad_norm=1.0
        )
    table["torchao 100% bf16 states"] = torchao_offload
    for fraction in (0.25, 0.5, 1.0):
        table[f"megatron {fraction:.0%}"] = megatron_offload(fraction)
    return {**table, **muon_rows.rows(OPTIONS)}


def base_of(row: str) -> str:
    """Return the row that the ratio of `row` is to."""
    return muon_rows.NOTHING_OFFLOADED if row.startswith("muon") else "none"


@contextmanager
def training(build: Build, shape: DecoderShape, device: Device) -> Iterator[tuple[nn.Module, Any, float]]:
    """Yield model, optimizer and the seconds that building the optimizer took; leave nothing behind."""
    torch.manual_seed(0)
    with device.torch_device:
        model = Decoder(shape).to(torch.bfloat16)
    start = time.perf_counter()
    optimizer = build(model)
    device.synchronize()
    built_s = time.perf_counter() - start
    try:
        yield model, optimizer, built_s
    finally:
        if isinstance(optimizer, HybridDeviceOptimizer | OptimizerStateOffloader):
            optimizer.close()


def measure(build: Build, shape: DecoderShape, device: Device, batch: int, tokens: int) -> dict[str, object]:
    """Train a few steps and return times in seconds and sizes in decimal GB."""
    ids = torch.randint(0, shape.vocab, (batch, tokens), generator=torch.Generator().manual_seed(0)).to(
        device.torch_device
    )
    forget_caches(device)
    # Some peers hold on to memory.
    left_bytes = device_bytes(device) or 0
    with training(build, shape, device) as (model, optimizer, built_s), Ledger(device) as ledger:
        times, step_times, host_times, losses = [], [], [], []
        peaks_bytes, step_peaks_bytes = [], []
        for _ in range(WARM_UP + MEASURED):
            device.record().synchronize()
            ledger.reset_peak()
            start = time.perf_counter()
            loss = decoder_loss(model(ids), ids)
            loss.backward()
            peaks_bytes.append(ledger.peak_device_bytes)
            ledger.reset_peak()
            in_step = time.perf_counter()
            optimizer.step()
            step_peaks_bytes.append(ledger.peak_device_bytes)
            optimizer.zero_grad()
            host_times.append(time.perf_counter() - in_step)
            device.record().synchronize()
            end = time.perf_counter()
            times.append(end - start)
            step_times.append(end - in_step)
            # Read at the end: a copy of one number may wait behind copies of states, outside of the timed part.
            losses.append(loss.detach())
        del loss
        if isinstance(optimizer, HybridDeviceOptimizer | OptimizerStateOffloader):
            optimizer.synchronize()
        device.synchronize()
        return {
            "step_s": statistics.median(times[WARM_UP:]),
            "step_call_s": statistics.median(step_times[WARM_UP:]),
            "step_on_host_s": statistics.median(host_times[WARM_UP:]),
            "first_step_s": times[0],
            "build_s": built_s,
            "peak_gb": (max(peaks_bytes[1:] + step_peaks_bytes[1:]) - left_bytes) / 1e9,
            "step_peak_gb": (max(step_peaks_bytes[1:]) - left_bytes) / 1e9,
            "resident_gb": (ledger.device_bytes - left_bytes) / 1e9,
            "loss": [round(loss.item(), 4) for loss in losses],
            **({"split": list(optimizer.split)} if isinstance(optimizer, HybridDeviceOptimizer) else {}),
        }


def solved_split(device: Device, numel: int) -> dict[str, object]:
    """Return the split chosen by `auto`, and the predicted and measured seconds of one bare update."""
    rates = machine_rates(device)
    weights = [
        nn.Parameter(torch.zeros(numel // 16, dtype=torch.bfloat16, device=device.torch_device))
        for _ in range(16)
    ]
    times: list[float] = []
    # Chunks that are small against the whole, so that it is split at toy size too.
    streaming = Streaming(chunk_bytes=min(96 * 2**20, numel))
    options = {**OPTIONS, "max_grad_norm": 1.0, "streaming": streaming}
    with HybridDeviceOptimizer(weights, split="auto", **options) as optimizer:
        for _ in range(WARM_UP + MEASURED):
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            device.synchronize()
            start = time.perf_counter()
            optimizer.step()
            optimizer.synchronize()
            device.synchronize()
            times.append(time.perf_counter() - start)
        split = optimizer.split
    each = state_bytes([(numel, 2)], moments=2)
    predicted, measured = whole_update_seconds(split, numel, each, rates), statistics.median(times[WARM_UP:])
    return {
        "split": list(split),
        "rates": rates._asdict(),
        "predicted_s": predicted,
        "measured_s": measured,
        "off": measured / predicted - 1,
    }


def trace(
    build: Build, shape: DecoderShape, device: Device, batch: int, tokens: int, path: Path
) -> dict[str, float]:
    """Write a trace of three steps of a row in its steady state, one behind the other; return its overlap."""
    ids = torch.randint(0, shape.vocab, (batch, tokens), device=device.torch_device)
    begun_ns = 0
    forget_caches(device)
    with training(build, shape, device) as (model, optimizer, _), watched_updates() as updates:

        def steps(count: int = 3) -> None:
            nonlocal begun_ns
            begun_ns = time.perf_counter_ns()
            for _ in range(count):
                with torch.profiler.record_function(REPEATED):
                    decoder_loss(model(ids), ids).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        steps(WARM_UP)
        overlap = record(steps, path)
        if isinstance(optimizer, HybridDeviceOptimizer | OptimizerStateOffloader):
            optimizer.synchronize()
        add_lane(path, updates, begun_ns)
        return overlap


def main() -> None:
    """Run the rows that are asked for, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--tokens", default="8192,32768", help="tokens a step, comma separated")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, comma separated"
    )
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument(
        "--trace", type=Path, help="write a Perfetto trace of a row, at the first of --tokens"
    )
    parser.add_argument("--figure", type=Path, help="draw one step of --trace as an SVG")
    parser.add_argument("--pinned", help="limit of pinned memory of this process, for example 2GiB")
    parser.add_argument("--trace-row", default="ours 100%", help="the first row whose name contains this")
    args = parser.parse_args()
    if args.figure and not args.trace:
        parser.error("--figure draws a trace; expected --trace with it; try --trace trace.json")
    if args.pinned:
        limit_pinned_memory(parse_bytes(args.pinned, option="--pinned"))
    device = Device.of("cuda" if torch.cuda.is_available() else "cpu")
    shape, tokens = (TINY, 32) if args.tiny else (PUBLISHED, 2048)
    report: dict[str, Any] = {"machine": machine(device), "shape": vars(shape), "tokens": {}}
    print(json.dumps(report["machine"]))
    wanted = [part for part in args.rows.split(",") if part]
    for total in [128] if args.tiny else [int(part) for part in args.tokens.split(",")]:
        results: dict[str, Any] = {}
        table = rows()
        asked = [name for name in table if not wanted or any(part in name for part in wanted)]
        for name in dict.fromkeys(each for row in asked for each in (base_of(row), row)):
            build = table[name]
            try:
                results[name] = measure(build, shape, device, total // tokens, tokens)
            except ImportError as missing:
                results[name] = {"left out": str(missing)}
                continue
            ratio = results[name]["step_s"] / results[base_of(name)]["step_s"]
            results[name] = {"ratio": ratio, **results[name]}
            print(
                total,
                name,
                {k: round(v, 4) if isinstance(v, float) else v for k, v in results[name].items()},
                flush=True,
            )
        print(f"\n{total} tokens a step")
        print_table([{"row": name, **result} for name, result in results.items()])
        report["tokens"][total] = results
    if not wanted or "auto" in args.rows:
        report["solved_split"] = solved_split(device, 2**16 if args.tiny else 2**30)
        print("solved split", report["solved_split"])
    if args.trace:
        build = next(build for name, build in rows().items() if args.trace_row in name)
        batch = int(args.tokens.split(",")[0]) // tokens
        report["overlap"] = trace(build, shape, device, batch, tokens, args.trace)
        print("overlap", report["overlap"])
        if args.figure:
            draw(args.trace, args.figure, f"{args.trace_row}, {batch * tokens} tokens a step")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
