# SPDX-License-Identifier: Apache-2.0
"""Frozen-layer streaming against resident weights, in one process, as ratios to the resident step.

    python benchmarks/frozen_layers.py --out frozen.json        # the published model, needs a large GPU
    python benchmarks/frozen_layers.py --tiny                   # the same code at toy size, also on the CPU twin
    python benchmarks/frozen_layers.py --does-not-fit           # with a run that has less memory than weights
    python benchmarks/frozen_layers.py --trace trace.json       # with a Perfetto trace of two steps
    python benchmarks/frozen_layers.py --rows streamed --tokens 8192 --pinned 2GiB,512MiB --old CHECKOUT
                                                                # with little pinned memory, beside older code
    python benchmarks/frozen_layers.py --rows recomputed        # beside block swaps of others (`block_swaps.py`)

A row is LoRA training at batch 1: forward, backward, AdamW on the adapters, zero_grad. Times are medians of
steps 3 to 6; the peak is the allocator's. `same_bits` is a run of its own, for every row and size, with deterministic
kernels, because flash attention's backward adds up in another order each time: losses and gradients equal the
resident run's. The program ends with an error when they do not, after everything has been printed and written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from block_swaps import musubi, recomputed, unsloth
from caches import forget_caches
from machine import machine, print_table
from torch import nn
from trace_overlap import record

from reference_impl import FrozenLayerStreamer, limit_pinned_memory
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss
from skill_tools.units import parse_bytes

# cuBLAS's setting for deterministic kernels; read once, when the first one runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

PUBLISHED = DecoderShape(hidden=4096, ffn=14336, layers=16, heads=32, vocab=32000)
TINY = DecoderShape(hidden=64, ffn=176, layers=6, heads=4, vocab=256)
RANK = 16
WARM_UP, MEASURED = 2, 4

Attach = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Setting:
    """The model's shape, the tokens of its one sequence, and the device."""

    shape: DecoderShape
    tokens: int
    device: Device

    def ids(self) -> torch.Tensor:
        """Return the batch, its own labels."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.shape.vocab, (1, self.tokens), generator=generator)
        return ids.to(self.device.torch_device)


def resident(model: nn.Module) -> Any:
    """Keep every weight on the device: the reference of every ratio."""
    return nullcontext()


def streamed(**options: Any) -> Attach:
    """Return the function that attaches a streamer."""
    return lambda model: FrozenLayerStreamer(model, **options)


def limited(limit_bytes: int, **options: Any) -> Attach:
    """Return the function that attaches a streamer, in a process limited to `limit_bytes` of pinned memory."""

    @contextmanager
    def attached(model: nn.Module) -> Iterator[FrozenLayerStreamer]:
        with limit_pinned_memory(limit_bytes), FrozenLayerStreamer(model, **options) as streamer:
            yield streamer

    return attached


def rows(shape: DecoderShape, pinned: Sequence[str] = ()) -> dict[str, Attach]:
    """Return every row of the table by name: in "half pinned" half of the layers pass through staging memory.

    The last have a limit on pinned memory each, as `pinned` says.
    """
    layer_bytes = 2 * shape.hidden * (4 * shape.hidden + 3 * shape.ffn)
    half_pinned_bytes = (shape.layers // 2 + 2) * layer_bytes
    layers = shape.layers
    few_pinned = {
        f"streamed{words}, {limit} pinned": limited(parse_bytes(limit, option="--pinned"), **options)
        for limit in pinned
        for words, options in (("", {}), (", compressed", {"compress": True}))
    }
    return {
        "resident": resident,
        "streamed": streamed(),
        "streamed, compressed": streamed(compress=True),
        "streamed, prefetch 1": streamed(prefetch=1),
        "half resident": streamed(resident_layers=layers // 2),
        "half pinned": streamed(host_limit_bytes=half_pinned_bytes),
        **few_pinned,
        "recomputed, resident": recomputed(resident),
        "recomputed, streamed": recomputed(streamed()),
        "recomputed, streamed, compressed": recomputed(streamed(compress=True)),
        **{f"recomputed, {name}": recomputed(attach) for name, attach in few_pinned.items()},
        **(peers() if torch.cuda.is_available() else {}),
    }


def peers() -> dict[str, Attach]:
    """Return the rows of others by name; they copy between a GPU and its host, and know no twin."""
    return {
        "recomputed, musubi-tuner, copies in alone": musubi(exchanges=False, pinned=True),
        "recomputed, musubi-tuner, copies in alone, two pinned buffers": musubi(
            exchanges=False, pinned=False
        ),
        "recomputed, musubi-tuner, exchanges": musubi(exchanges=True, pinned=True),
        "recomputed, Unsloth": unsloth,
    }


def build(setting: Setting) -> nn.Module:
    """Return the bf16 decoder with its adapters, on the device, the same each time."""
    forget_caches(setting.device)
    torch.manual_seed(0)
    with setting.device.torch_device:
        model = Decoder(setting.shape).to(torch.bfloat16)
        add_lora(model, RANK)
    # As peft arranges it for checkpointing: the first layer's input needs a gradient.
    model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return model


def training_step(model: nn.Module, setting: Setting) -> Callable[[], torch.Tensor]:
    """Return the function that runs one step and returns its loss."""
    ids = setting.ids()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure(attach: Attach, setting: Setting, model: nn.Module) -> dict[str, Any]:
    """Train a few steps; return times in seconds and sizes in decimal GB."""
    device = setting.device
    start = time.perf_counter()
    with attach(model) as attached, Ledger(device, track=(*model.parameters(), *model.buffers())) as ledger:
        device.synchronize()
        attached_s = time.perf_counter() - start
        if device.is_accelerator:
            torch.cuda.empty_cache()
        step = training_step(model, setting)
        times = []
        for index in range(WARM_UP + MEASURED):
            if index == 1:
                ledger.reset_peak()
                before = loaded_bytes(attached)
            device.synchronize()
            start = time.perf_counter()
            step()
            device.synchronize()
            times.append(time.perf_counter() - start)
        loaded = loaded_bytes(attached) - before
        return {
            "step_s": statistics.median(times[WARM_UP:]),
            "peak_gb": ledger.peak_device_bytes / 1e9,
            "loaded_gb_per_step": loaded / (WARM_UP + MEASURED - 1) / 1e9,
            "late_loads": attached.report.late_loads if attached else 0,
            "first_step_s": times[0],
            "attach_s": attached_s,
            "reserved_gb": torch.cuda.memory_reserved() / 1e9 if device.is_accelerator else 0.0,
        }


def bits(attach: Attach, setting: Setting, model: nn.Module) -> list[torch.Tensor]:
    """Return the losses of three steps with deterministic kernels, and the last gradients."""
    torch.use_deterministic_algorithms(True)
    try:
        with attach(model):
            step = training_step(model, setting)
            losses = [step().cpu() for _ in range(3)]
            return losses + [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    finally:
        torch.use_deterministic_algorithms(False)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether all tensors are bitwise equal."""
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def loaded_bytes(attached: Any) -> int:
    """Return the bytes that a streamer has copied to the device."""
    return attached.report.loaded_bytes if attached else 0


def does_not_fit(setting: Setting, fraction_of_weights: float = 0.75) -> dict[str, Any]:
    """Train with less device memory than frozen weights, which are on the host from the start."""
    where = setting.device.torch_device
    model = build(setting)
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    expected = bits(resident, setting, model)
    del model
    model = build(setting).cpu()
    torch.cuda.empty_cache()
    allowed_bytes = int(fraction_of_weights * frozen_bytes)
    torch.cuda.set_per_process_memory_fraction(
        allowed_bytes / torch.cuda.get_device_properties(where).total_memory
    )
    try:
        model.to(where)
        resident_outcome = "fits"
    except torch.OutOfMemoryError:
        resident_outcome = "torch.OutOfMemoryError"
    model.cpu()
    torch.cuda.empty_cache()
    same_bits = equal(bits(streamed(device=where), setting, model), expected)
    result = measure(streamed(device=where), setting, model)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "layers": setting.shape.layers,
        "tokens": setting.tokens,
        "frozen_gb": frozen_bytes / 1e9,
        "allowed_gb": allowed_bytes / 1e9,
        "resident": resident_outcome,
        "same_bits": same_bits,
        **result,
    }


def trace(attach: Attach, setting: Setting, path: Path) -> dict[str, float]:
    """Write a trace of a row in its steady state; return copy times, overlap, and the D2H bytes of a step."""
    model = build(setting)
    with attach(model):
        step = training_step(model, setting)
        for _ in range(WARM_UP):
            step()
        overlap = record(step, path)
    events = json.loads(path.read_text())["traceEvents"]
    copied = [e["args"]["bytes"] for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    return {**overlap, "DtoH_bytes_per_step": sum(copied) / 2}


def of_older_code(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the report of this program with the package of `checkout`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "old.json"
        subprocess.run(
            [sys.executable, __file__, *arguments, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            check=True,
        )
        report: dict[str, Any] = json.loads(out.read_text())
    return report


def main() -> None:
    """Run the rows that are asked for, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--tokens", default="2048,8192,16384", help="tokens a step, comma separated")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, comma separated"
    )
    parser.add_argument(
        "--does-not-fit", action="store_true", help="also train with less memory than weights"
    )
    parser.add_argument(
        "--pinned", default="", help="limits on pinned memory, such as 2GiB, comma separated: a row each"
    )
    parser.add_argument("--old", type=Path, help="a checkout with older code, for the same rows beside these")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--trace", type=Path, help="write a Perfetto trace of the streamed row, 8192 tokens")
    args = parser.parse_args()
    device = Device.of("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if args.tiny else PUBLISHED
    report: dict[str, Any] = {"machine": machine(device), "shape": vars(shape), "rank": RANK, "tokens": {}}
    print(json.dumps(report["machine"]))
    wanted = [part for part in args.rows.split(",") if part]
    tokens = [64] if args.tiny else [int(part) for part in args.tokens.split(",")]
    pinned = [limit for limit in args.pinned.split(",") if limit]
    if args.old:
        rest = ["--tiny"] if args.tiny else ["--tokens", args.tokens]
        report["old"] = of_older_code(args.old, [*rest, "--rows", args.rows, "--pinned", args.pinned])
    for count in tokens:
        setting = Setting(shape, count, device)
        results: dict[str, Any] = {}
        baseline = measure(resident, setting, build(setting))
        expected = bits(resident, setting, build(setting))
        for name, attach in rows(shape, pinned).items():
            if wanted and name != "resident" and not any(part in name for part in wanted):
                continue
            try:
                result = baseline if attach is resident else measure(attach, setting, build(setting))
            except ImportError as missing:
                print(f"{name} is left out: {missing}")
                continue
            results[name] = {
                "ratio": result["step_s"] / baseline["step_s"],
                "less_gb": baseline["peak_gb"] - result["peak_gb"],
                "same_bits": equal(bits(attach, setting, build(setting)), expected),
                **result,
            }
        if "streamed" in results:
            for result in results.values():
                result["to_unlimited"] = result["step_s"] / results["streamed"]["step_s"]
        report["tokens"][count] = results
        print(f"\n{count} tokens a step")
        print_table([{"row": name, **result} for name, result in results.items()])
    if args.does_not_fit:
        larger = replace(shape, layers=2 * shape.layers)
        report["does_not_fit"] = does_not_fit(Setting(larger, 1024, device))
        print("\ndoes not fit:", json.dumps(report["does_not_fit"]))
    if args.trace:
        report["overlap"] = trace(streamed(), Setting(shape, 8192, device), args.trace)
        print("overlap", report["overlap"])
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    other = other_bits(report)
    if other:
        raise SystemExit(f"other bits than resident: {'; '.join(other)}")
    print("\nsame bits in every row")


def other_bits(report: dict[str, Any]) -> list[str]:
    """Return which rows of a report did not give the resident run's bits."""
    rows_ = {
        f"{name}, {tokens} tokens": row for tokens, of in report["tokens"].items() for name, row in of.items()
    }
    if "does_not_fit" in report:
        rows_["the model that does not fit"] = report["does_not_fit"]
    return [name for name, row in rows_.items() if not row["same_bits"]]


if __name__ == "__main__":
    main()
