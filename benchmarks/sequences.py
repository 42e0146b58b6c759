# SPDX-License-Identifier: Apache-2.0
"""One long sequence, trained whole: attention kept, layers that mix no positions in tiles, both, as ratios to neither.

    python benchmarks/sequences.py --model qwen3-4b --tokens 32768 --old CHECKOUT  # with older code beside, large GPU
    python benchmarks/sequences.py --model qwen3-4b --tokens 131072 --layers 12  # fewer layers, less time
    python benchmarks/sequences.py --model llama-3-8b --lora --tokens 131072 --layers 8  # adapters of attention
    python benchmarks/sequences.py --model qwen3-30b-a3b --lora --tokens 8192 --layers 12  # a mixture of experts
    python benchmarks/sequences.py --model qwen3-4b --tokens 256 --layers 2 --hidden 64  # toy size, any machine

A row is full training in bf16 with `TrainableLayerStreamer`, compact states of 8 low bits, inputs on the host, exact
clipping and the loss in chunks: forward, backward with each layer recomputed, step, zero_grad. `today` has no more;
`attention` is `keep_attention=True`, or in as many layers as `--kept-layers` says; `tiles` is `SequenceTiles` of
`--tiles`; `both` is both; `groups` is both and `HeadGroups`. With `--lora` the rows train adapters of rank 16 beside
attention's linear layers with `FrozenLayerStreamer` and `CheckpointOffloader`; `resident` is `today` with all weights
on the device. With `--compress` weights that stream have 12 bits each. `old` is `today` with the package of another
checkout, in a process of its own. Times are means of `--steps` steps behind one that warms up, since an update runs in
the next forward. GPU memory is the allocator's peak; `reserved` is its memory from the driver, without that of making
the model; host memory is the pinned part. Losses are those of all steps: rows may differ by the rounding of kernels.
With `--kernels` one more step runs under the profiler, which is the one that is timed with `--steps 0`. It tells the
number of kernels, and the time with at least one running: a faster host or link could reach it. The models are those
of Transformers, with random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from caches import forget_caches
from larger_than_gpu_rows import (
    TRACES,
    Row,
    Setting,
    Training,
    WithLoss,
    attached,
    layers_of,
    versions,
)
from machine import machine, print_table
from torch import nn
from trace_overlap import merge

from reference_impl import CheckpointOffloader, FrozenLayerStreamer
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.hugging_face import model_from, read_config

TODAY, ATTENTION, TILES, BOTH, GROUPS = "today", "attention", "tiles", "both", "groups"
RESIDENT = "resident"
ROWS = (RESIDENT, TODAY, ATTENTION, TILES, BOTH, GROUPS)
# The modules of Llama and Qwen3 that mix no positions and keep more than their input; the last is the final norm.
TILED = "mlp,input_layernorm,post_attention_layernorm,q_norm,k_norm,norm"
MODELS = ("qwen3-4b", "qwen3-8b", "llama-3-8b", "qwen3-30b-a3b")
RANK = 16


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, arranged as peft arranges it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        like = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, RANK, **like),  # type: ignore[arg-type]
            nn.Linear(RANK, base.out_features, **like),  # type: ignore[arg-type]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        adapted: torch.Tensor = self.base(x) + self.b(self.a(x))
        return adapted


def adapt(model: nn.Module) -> None:
    """Freeze `model` but for adapters of attention's linear layers."""
    model.requires_grad_(False)
    for layer in layers_of(model):
        attention: Any = layer.self_attn
        for name, child in list(attention.named_children()):
            if isinstance(child, nn.Linear):
                setattr(attention, name, Adapted(child))


def build(
    model: str, layers: int | None, hidden: int | None, device: Device, *, lora: bool, on_device: bool
) -> nn.Module:
    """Return the bf16 model with random weights, made on the device, on the host unless `on_device`."""
    forget_caches(device)
    torch.manual_seed(0)
    entries = {**read_config(TRACES / f"{model}.json"), "use_cache": False}
    if layers:
        entries["num_hidden_layers"] = layers
    if hidden:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
        entries |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 512, **heads}
    made = model_from(entries, "bfloat16", device.torch_device)
    if lora:
        adapt(made)
    return made if on_device else made.cpu()


def adapters(
    row: Row, model: nn.Module, setting: Setting, last: ExitStack, *, resident: bool, compress: bool
) -> Training:
    """Return the training of adapters, with frozen layers that stream unless they are `resident`; `last` undoes it."""
    if not resident:
        last.enter_context(
            FrozenLayerStreamer(
                model,
                resident_layers=row.resident_layers,
                compress=compress,
                device=setting.device.torch_device,
            )
        )
    last.enter_context(CheckpointOffloader(model, keep_attention=row.keep_attention))
    trained = [param for param in model.parameters() if param.requires_grad]
    return Training(WithLoss(model, setting.chunk_tokens), torch.optim.AdamW(trained, lr=1e-4, fused=True))


def measure(
    name: str,
    model: nn.Module,
    setting: Setting,
    tiles: list[str],
    tile_tokens: int,
    head_groups: dict[str, int],
    *,
    lora: bool,
    kept_layers: int | None = None,
    resident_layers: int = 0,
    compress: bool = False,
    counts_kernels: bool = False,
) -> dict[str, Any]:
    """Train a few steps of a row; return times in seconds and sizes in decimal GB."""
    device = setting.device
    forget_caches(device)
    row = Row(
        form="lo8",
        inputs="host",
        keep_attention=name in (ATTENTION, BOTH, GROUPS) and (True if kept_layers is None else kept_layers),
        resident_layers=resident_layers,
    )
    with ExitStack() as last, Ledger(device, track=model.parameters()) as ledger:
        if name in (TILES, BOTH, GROUPS):
            from reference_impl import SequenceTiles

            present = {inner.rpartition(".")[2] for inner, _ in model.named_modules()}
            last.enter_context(
                SequenceTiles(model, [each for each in tiles if each in present], tile_tokens=tile_tokens)
            )
        if name == GROUPS:
            from reference_impl import HeadGroups

            last.enter_context(HeadGroups(model, **head_groups))
        if lora:
            training = adapters(row, model, setting, last, resident=name == RESIDENT, compress=compress)
        else:
            training = attached(row, model, setting, last)
        config: Any = model.config
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, setting.tokens), generator=generator)
        ids = ids.to(device.torch_device)
        losses: list[torch.Tensor] = []

        def step() -> None:
            loss = training.whole(ids)
            losses.append(loss.detach())
            training.backward(loss)
            training.optimizer.step()
            training.optimizer.zero_grad()

        gc.collect()
        step()
        device.synchronize()
        ledger.reset_peak()
        start = time.perf_counter()
        for _ in range(setting.steps):
            step()
        device.synchronize()
        times = {"step_s": (time.perf_counter() - start) / setting.steps} if setting.steps else {}
        if counts_kernels:
            times = kernels_of(step, device) | times
        return {
            **times,
            "gpu_gb": ledger.peak_device_bytes / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if device.is_accelerator else 0.0,
            "pinned_gb": host_book.reserved_bytes / 1e9,
            "losses": [round(loss.item(), 4) for loss in losses],
        }


def kernels_of(step: Callable[[], None], device: Device) -> dict[str, float]:
    """Run a step under the profiler; return its time, how many kernels it has, and for how long one of them ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step()
        device.synchronize()
        step_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == "kernel"]
    busy = merge((each["ts"], each["ts"] + each["dur"]) for each in events)
    return {
        "step_s": step_s,
        "kernels": len(events),
        "kernels_s": sum(stop - start for start, stop in busy) / 1e6,
    }


def of_older_code(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    """Return the row `today` with the package of `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "old.json"
        subprocess.run(
            [sys.executable, __file__, *arguments, "--rows", TODAY, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            check=True,
        )
        (row,) = json.loads(out.read_text())["rows"]
    return {**row, "row": "old"}


def main() -> None:
    """Run the rows that are asked for, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the one sequence")
    parser.add_argument("--layers", type=int, help="in place of the model's own number")
    parser.add_argument("--hidden", type=int, help="toy size: this width, four heads, a small vocabulary")
    parser.add_argument(
        "--rows",
        default=",".join((TODAY, ATTENTION, TILES, BOTH, GROUPS)),
        help="some of these, and resident",
    )
    parser.add_argument("--tiles", default=TILED, help="last parts of names of modules; those that are there")
    parser.add_argument("--tile-tokens", type=int, default=4096)
    parser.add_argument(
        "--head-groups",
        type=int,
        help="of attention in the row `groups`, by default so many as its length asks for",
    )
    parser.add_argument(
        "--kept-layers", type=int, help="layers of which attention is kept, by default all of them"
    )
    parser.add_argument("--lora", action="store_true", help="train adapters of attention's linear layers")
    parser.add_argument(
        "--resident-layers", type=int, default=0, help="layers' worth of weights that stay on the device"
    )
    parser.add_argument("--compress", action="store_true", help="of weights that stream 12 bits each")
    parser.add_argument("--kernels", action="store_true", help="count kernels, and the time that they take")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens whose logits exist at once")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed")
    parser.add_argument("--old", type=Path, help="a checkout with older code, for a row beside these")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    names = args.rows.split(",")
    # An asked number counts for short sequences too.
    head_groups = {"groups": args.head_groups, "longer_than": args.tile_tokens} if args.head_groups else {}
    if not set(names) <= set(ROWS):
        parser.error(f"--rows has {args.rows}; expected some of {', '.join(ROWS)}")
    if (RESIDENT in names or args.compress) and not args.lora:
        parser.error(f"expected {RESIDENT} in --rows and --compress with --lora alone; try --lora")
    if not args.steps and not args.kernels:
        parser.error("--steps 0 times the step of --kernels; try --kernels, or --steps 1")
    device = Device.available()
    if args.kernels and not device.is_accelerator:
        parser.error("--kernels counts those of a GPU; expected one; try it without")
    setting = Setting(
        args.model, 1, 1, args.tokens, args.steps, device, own=False, chunk_tokens=args.chunk_tokens
    )
    report: dict[str, Any] = {"machine": {**machine(device), **versions()}, "rows": []}
    print(json.dumps(report["machine"]), flush=True)

    def add(result: dict[str, Any]) -> None:
        first = report["rows"][0] if report["rows"] else result
        if "step_s" in result and "step_s" in first:
            result |= {
                f"{of}_ratio": result[f"{of}_{unit}"] / first[f"{of}_{unit}"]
                for of, unit in (("step", "s"), ("gpu", "gb"))
            }
        report["rows"].append(result)
        print(json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))

    if args.old:
        rest = [
            f"--{name}={value}"
            for name, value in vars(args).items()
            if name in ("model", "tokens", "layers", "hidden", "steps") and value
        ]
        add(of_older_code(args.old, [*rest, f"--chunk-tokens={args.chunk_tokens}"]))
    for name in names:
        model = build(
            args.model, args.layers, args.hidden, device, lora=args.lora, on_device=name == RESIDENT
        )
        try:
            tiles = args.tiles.split(",")
            found = measure(
                name,
                model,
                setting,
                tiles,
                args.tile_tokens,
                head_groups,
                lora=args.lora,
                kept_layers=args.kept_layers,
                resident_layers=args.resident_layers,
                compress=args.compress,
                counts_kernels=args.kernels,
            )
            add({"row": name, **found})
        except (MemoryError, torch.OutOfMemoryError) as error:
            add({"row": name, "failed": str(error).splitlines()[0]})
    print()
    print_table([{key: value for key, value in row.items() if key != "losses"} for row in report["rows"]])


if __name__ == "__main__":
    main()
