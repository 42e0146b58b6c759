# SPDX-License-Identifier: Apache-2.0
"""A model larger than the GPU, trained whole: steps, GPU and host memory, the ratio to no offload, and the least time.

    python benchmarks/larger_than_gpu.py --model llama-3-8b --memory-gb 16 --sequences 4 --rows lo8  # on a large GPU
    python benchmarks/larger_than_gpu.py --model qwen3-4b --rows resident,exact,lo8,fsdp2  # one after another
    python benchmarks/larger_than_gpu.py --model llama-3-8b --sequences 4 \\
        --rows resident,lo8:memory=10:inputs=host,lo8:memory=16:resident=9,packed:memory=16:no-clip
    python benchmarks/larger_than_gpu.py --model qwen3-4b --rows lo8:memory=8 --trace trace.json --figure timeline.svg
    python benchmarks/larger_than_gpu.py --model qwen3-4b --tokens 131072 --inputs host --rows lo8,lo8:attention
    python benchmarks/larger_than_gpu.py --model tiny  # any machine

A row is full training in bf16 with AdamW, random weights, and exact clipping unless `no-clip`: forward, backward with
each layer recomputed, step, zero_grad. The words behind a colon hold for that row alone: `memory`, `inputs`,
`resident`, `prefetch`, as the options of these names, `attention` (outputs kept on the host), `chunk` (MiB of a chunk
of states), and `no-clip` (updates in backward). Layers run `--slices` micro-batches one after the other, by default
each sequence of `--tokens` alone; fewer are fewer kernels and more memory. The loss is chunked in every row. `resident`
keeps all on the GPU (`HybridDeviceOptimizer(offload_fraction=0)`), recomputed and sliced alike, but its slices add up
in bf16; it has no memory limit. `fsdp2` is torch's FSDP2 on one rank with CPUOffloadPolicy and fp32 parameters,
`fsdp2-bf16` with bf16 ones and states, which is other arithmetic; `zero3` is DeepSpeed's ZeRO-3, parameters and
optimizer on the host, where deepspeed is installed. A step's update runs behind the next forward, so the time is the
mean of `--steps` steps in a row; `times_s` are those of each, the ones that warm up first. `limit_s` is the time that
compute and the measured link need at least (`stream_limits`). GPU memory is the allocator's peak, reserved included;
host memory is the pinned part, and the process's own peak. Models are Hugging Face's classes where transformers is
installed, else decoders of like shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import stream_limits
import torch
from draw_trace import draw
from larger_than_gpu_rows import (
    MAX_NORM,
    RESIDENT,
    SHAPES,
    Row,
    Setting,
    WithLoss,
    attached,
    build,
    hidden_states,
    layers_of,
    row_of,
    versions,
)
from machine import machine, print_table
from trace_overlap import REPEATED, record

from reference_impl import TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.rates import CopyRates
from reference_impl.trained_layers.segments import recompute_in_slices

WARM_UP = 2


@dataclass(frozen=True)
class Limits:
    """The bounds of every row: compute, and the link."""

    compute: stream_limits.Compute
    link: CopyRates


def limits(setting: Setting) -> Limits:
    """Measure forward and backward without an update, and the link."""
    ids = setting.ids()

    def few(layers: int) -> WithLoss:
        model = build(setting, on_device=True, layers=layers)
        for layer in layers_of(model):
            recompute_in_slices(layer, setting.slices)
        return WithLoss(model, setting.chunk_tokens)

    compute = stream_limits.compute_of(
        few,
        lambda whole: hidden_states(whole.model, ids),
        lambda whole, hidden: whole.loss(hidden, ids),
        layers=SHAPES[setting.model].layers,
        device=setting.device,
    )
    return Limits(compute, stream_limits.link(setting.device))


def limit_of(row: Row, streamer: TrainableLayerStreamer, known: Limits) -> float:
    """Return the least seconds of a step of `row`."""
    host = streamer.report.host
    parameters = sum(p.numel() for group in streamer.optimizer.param_groups for p in group["params"])
    # Masters and moments that the CPU updates cross no link. In the place of a gradient a new weight comes in there.
    states = host.states / parameters - 12 * row.on_cpu
    return stream_limits.limit_s(
        known.compute,
        stream_limits.Traffic(parameters, host.weights // 2, states),
        known.link,
        clips=row.max_grad_norm is not None,
    )


def measure(row: Row, setting: Setting, known: Limits, trace: Path | None = None) -> dict[str, Any]:
    """Train a few steps of a row; return times in seconds and sizes in decimal GB.

    With `trace`, more steps follow: it gets their Perfetto trace, and the result their overlap.
    """
    device = setting.device
    with suppress(OSError):
        # The process's peak begins anew where the kernel allows it.
        Path("/proc/self/clear_refs").write_text("5")
    model = build(setting, on_device=row.form == RESIDENT)
    limited = row.memory_gb is not None and device.is_accelerator and row.form != RESIDENT
    if limited:
        assert row.memory_gb is not None
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(row.memory_gb * 1e9 / total)
    start = time.perf_counter()
    try:
        with ExitStack() as last, Ledger(device, track=model.parameters()) as ledger:
            training = attached(row, model, setting, last)
            streamer = training.streamer
            device.synchronize()
            attached_s = time.perf_counter() - start
            ids, marks = setting.ids(), []

            def step() -> torch.Tensor:
                marks.append(device.mark())
                loss = training.whole(ids)
                training.backward(loss)
                training.optimizer.step()
                training.optimizer.zero_grad()
                return loss.detach()

            # A full collection of garbage takes 0.2 s with a model of transformers, every third step.
            gc.collect()
            gc.freeze()
            losses = [step() for _ in range(WARM_UP)]
            device.synchronize()
            ledger.reset_peak()
            late = 0 if streamer is None else streamer.report.weights.late_loads
            start = time.perf_counter()
            losses += [step() for _ in range(setting.steps)]
            marks.append(device.mark())
            device.synchronize()
            step_s = (time.perf_counter() - start) / setting.steps
            sizes = {
                "gpu_gb": ledger.peak_device_bytes / 1e9,
                "gpu_reserved_gb": reserved_gb(device),
                "pinned_gb": host_book.reserved_bytes / 1e9,
                "host_gb": process_gb("VmRSS"),
                "host_peak_gb": process_gb("VmHWM"),
                "late_loads": 0 if streamer is None else streamer.report.weights.late_loads - late,
            }
            return {
                "step_s": step_s,
                "limit_s": "" if streamer is None else limit_of(row, streamer, known),
                "tokens_per_s": round(setting.sequences * setting.tokens / step_s),
                **sizes,
                "attach_s": attached_s,
                "times_s": [round(begun.seconds_until(ended), 3) for begun, ended in pairwise(marks)],
                "losses": [round(loss.item(), 4) for loss in losses],
                **({} if trace is None else {"overlap": record(lambda: repeat(step), trace)}),
            }
    finally:
        gc.unfreeze()
        if limited:
            torch.cuda.set_per_process_memory_fraction(1.0)


def repeat(step: Callable[[], object]) -> None:
    """Take three steps, one behind the other, each with its mark in a trace."""
    for _ in range(3):
        with torch.profiler.record_function(REPEATED):
            step()


def reserved_gb(device: Device) -> float:
    """Return the most that the allocator has reserved since the peak was reset."""
    return torch.cuda.max_memory_reserved() / 1e9 if device.is_accelerator else 0.0


def process_gb(field: str) -> float:
    """Return `VmRSS` or `VmHWM` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(f"{field}:"))


def arguments() -> tuple[argparse.Namespace, list[tuple[str, Row]]]:
    """Read the command line; return it, and the rows by the text that asked for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--own", action="store_true", help="our decoder, also where transformers is installed"
    )
    parser.add_argument(
        "--rows",
        default="resident,exact,half,packed,lo16,lo8",
        help="some of these or of fsdp2, fsdp2-bf16, zero3",
    )
    parser.add_argument("--sequences", type=int, default=1, help="of a step")
    parser.add_argument(
        "--slices", type=int, help="micro-batches inside the layers, by default one a sequence"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed")
    parser.add_argument("--memory-gb", type=float, help="the most GPU memory of all rows but resident")
    parser.add_argument("--no-clip", action="store_true", help="without clipping")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--resident-layers", type=int, default=0, help="layers' worth of weights that stay")
    parser.add_argument("--inputs", choices=("device", "host"), default="device")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens whose logits exist at once")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--trace", type=Path, help="write a Perfetto trace of the last row")
    parser.add_argument("--figure", type=Path, help="draw one step of --trace as an SVG")
    args = parser.parse_args()
    if args.figure and not args.trace:
        parser.error("--figure draws a trace; expected --trace with it; try --trace trace.json")
    defaults = Row(
        form=RESIDENT,
        max_grad_norm=None if args.no_clip else MAX_NORM,
        memory_gb=args.memory_gb,
        prefetch=args.prefetch,
        resident_layers=args.resident_layers,
        inputs=args.inputs,
    )
    try:
        rows = [(text, row_of(text, defaults)) for text in args.rows.split(",") if text]
    except ValueError as error:
        parser.error(str(error))
    return args, rows


def main() -> None:
    """Run the rows that are asked for, print the table, write JSON."""
    args, rows = arguments()
    device = Device.available()
    tokens = 16 if args.model == "tiny" else args.tokens
    setting = Setting(
        args.model,
        args.sequences,
        args.slices or args.sequences,
        tokens,
        args.steps,
        device,
        own=args.own,
        chunk_tokens=args.chunk_tokens,
    )
    known = limits(setting)
    report: dict[str, Any] = {
        "machine": {**machine(device), **versions(), **vars(known.compute), **vars(known.link)},
        "setting": {**{name: str(value) for name, value in vars(args).items()}, "tokens": setting.tokens},
        "rows": [],
    }
    print(json.dumps(report["machine"]), flush=True)
    baseline: float | None = None
    for number, (text, row) in enumerate(rows, 1):
        trace = args.trace if number == len(rows) else None
        try:
            result = {"row": text, **measure(row, setting, known, trace)}
        except (ImportError, MemoryError, torch.OutOfMemoryError) as error:
            result = {"row": text, "failed": str(error).splitlines()[0]}
        if row.form == RESIDENT:
            baseline = result.get("step_s")
        if baseline is not None and "step_s" in result:
            result["ratio"] = result["step_s"] / baseline
        report["rows"].append(result)
        print(json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))
    print()
    print_table(
        [
            {k: v for k, v in result.items() if k not in ("losses", "overlap", "times_s")}
            for result in report["rows"]
        ]
    )
    if args.figure:
        draw(args.trace, args.figure, f"{args.model}, {text}, {args.sequences} x {tokens} tokens a step")


if __name__ == "__main__":
    main()
