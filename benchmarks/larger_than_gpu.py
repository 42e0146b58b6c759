"""A model larger than the GPU, trained whole: steps, GPU and host memory, and the ratio to no offload.

    python benchmarks/larger_than_gpu.py --model llama-3-8b --memory-gb 16 --sequences 4 --rows lo8  # on a large GPU
    python benchmarks/larger_than_gpu.py --model qwen3-4b --rows resident,exact,lo8  # one after another
    python benchmarks/larger_than_gpu.py --model tiny  # any machine

A row is full training in bf16 with AdamW, random weights, and exact clipping unless `--no-clip`: forward, backward
with each layer recomputed, step, zero_grad. Each sequence of `--tokens` is a micro-batch inside the layers. The loss
is chunked in every row. `resident` keeps everything on the GPU (`HybridDeviceOptimizer(offload_fraction=0)`),
recomputed and sliced alike; it has no memory limit. A step's update runs behind the next forward, so the time is the
mean of `--steps` steps in a row. GPU memory is the allocator's peak, reserved included; host memory is what is
pinned, and the process's own peak. Models are Hugging Face's classes where transformers is installed, else decoders
of like shape.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from caches import forget_caches
from machine import machine, print_table
from torch import nn

from reference_impl import HybridDeviceOptimizer, Streaming, TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.trained_layers.segments import recompute_in_slices
from reference_impl.verification.hugging_face import model_from, read_config
from reference_impl.verification.model import Decoder, DecoderShape

TRACES = Path(__file__).resolve().parent.parent / "skill_tools" / "knowledge" / "traces"
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
# The nearest that our own decoder has.
SHAPES = {
    "llama-3-8b": DecoderShape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "qwen3-4b": DecoderShape(hidden=2560, ffn=9728, layers=36, heads=20, kv_heads=5, vocab=151936),
    "qwen3-8b": DecoderShape(hidden=4096, ffn=12288, layers=36, heads=32, kv_heads=8, vocab=151936),
    "qwen3-14b": DecoderShape(hidden=5120, ffn=17408, layers=40, heads=40, kv_heads=8, vocab=151936),
    "tiny": DecoderShape(hidden=64, ffn=176, layers=6, heads=4, vocab=256),
}
STATES = {
    "exact": Streaming(),
    "half": Streaming(hi_lo_masters=True),
    "packed": Streaming(hi_lo_masters=True, moments_dtype=torch.bfloat16),
    "lo16": Streaming(compact_low_bits=16),
    "lo8": Streaming(compact_low_bits=8),
}
WARM_UP = 2
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, and how."""

    model: str
    sequences: int
    tokens: int
    steps: int
    device: Device
    max_grad_norm: float | None
    prefetch: int
    resident_layers: int
    inputs: Any
    own: bool
    chunk_tokens: int

    def ids(self) -> torch.Tensor:
        """Return the batch, its own labels."""
        vocab = SHAPES[self.model].vocab
        ids = torch.randint(
            0, vocab, (self.sequences, self.tokens), generator=torch.Generator().manual_seed(0)
        )
        return ids.to(self.device.torch_device)


def build(setting: Setting, *, on_device: bool) -> nn.Module:
    """Return the bf16 model with random weights, made on the device, on the host unless `on_device`."""
    forget_caches(setting.device)
    torch.manual_seed(0)
    if setting.own or setting.model == "tiny" or not versions():
        with setting.device.torch_device:
            model: nn.Module = Decoder(SHAPES[setting.model]).to(torch.bfloat16)
    else:
        entries = QWEN3_14B if setting.model == "qwen3-14b" else read_config(TRACES / f"{setting.model}.json")
        entries = {**entries, "use_cache": False}
        model = model_from(entries, "bfloat16", setting.device.torch_device)
    return model if on_device else model.cpu()


def hidden_states(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, nn.Linear]:
    """Return what the head takes, and the head."""
    if isinstance(model, Decoder):
        hidden = model.embedding(ids)
        for layer in model.layers:
            hidden = layer(hidden)
        return model.norm(hidden), model.head
    inner: Any = model
    return inner.model(input_ids=ids, use_cache=False).last_hidden_state, inner.lm_head


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks."""
    inner: Any = model if isinstance(model, Decoder) else model.model
    layers: nn.ModuleList = inner.layers
    return layers


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting
) -> Callable[[], torch.Tensor]:
    """Return what takes one step and returns its loss, on the device."""
    ids = setting.ids()

    def step() -> torch.Tensor:
        hidden, head = hidden_states(model, ids)
        loss = chunked_cross_entropy(head, hidden[:, :-1], ids[:, 1:], chunk_tokens=setting.chunk_tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def attached(
    row: str, model: nn.Module, setting: Setting, last: ExitStack
) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer of a row, and the streamer if it has one; `last` undoes it."""
    if row == "resident":
        for layer in layers_of(model):
            last.callback(recompute_in_slices(layer, setting.sequences))
        hybrid = HybridDeviceOptimizer(
            model.parameters(), offload_fraction=0.0, lr=LEARNING_RATE, max_grad_norm=setting.max_grad_norm
        )
        last.callback(hybrid.close)
        return hybrid, None
    streamer = TrainableLayerStreamer(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        max_grad_norm=setting.max_grad_norm,
        streaming=STATES[row],
        slices=setting.sequences,
        prefetch=setting.prefetch,
        resident_layers=setting.resident_layers,
        inputs=setting.inputs,
        layers=layers_of(model),
        device=setting.device.torch_device,
    )
    last.callback(streamer.close)
    return streamer.optimizer, streamer


def measure(row: str, setting: Setting, memory_gb: float | None) -> dict[str, Any]:
    """Train a few steps of a row; return times in seconds and sizes in decimal GB."""
    device = setting.device
    model = build(setting, on_device=row == "resident")
    limited = memory_gb is not None and device.is_accelerator and row != "resident"
    if limited:
        assert memory_gb is not None
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_gb * 1e9 / total)
    start = time.perf_counter()
    try:
        with ExitStack() as last, Ledger(device, track=model.parameters()) as ledger:
            optimizer, streamer = attached(row, model, setting, last)
            device.synchronize()
            attached_s = time.perf_counter() - start
            step = training_step(model, optimizer, setting)
            losses = [step() for _ in range(WARM_UP)]
            device.synchronize()
            ledger.reset_peak()
            late = 0 if streamer is None else streamer.report.weights.late_loads
            start = time.perf_counter()
            losses += [step() for _ in range(setting.steps)]
            device.synchronize()
            step_s = (time.perf_counter() - start) / setting.steps
            return {
                "row": row,
                "step_s": step_s,
                "tokens_per_s": round(setting.sequences * setting.tokens / step_s),
                "gpu_gb": ledger.peak_device_bytes / 1e9,
                "gpu_reserved_gb": reserved_gb(device),
                "pinned_gb": host_book.reserved_bytes / 1e9,
                "host_gb": process_gb("VmRSS"),
                "host_peak_gb": process_gb("VmHWM"),
                "late_loads": 0 if streamer is None else streamer.report.weights.late_loads - late,
                "attach_s": attached_s,
                "losses": [round(loss.item(), 4) for loss in losses],
            }
    finally:
        if limited:
            torch.cuda.set_per_process_memory_fraction(1.0)


def reserved_gb(device: Device) -> float:
    """Return the most that the allocator has reserved since the peak was reset."""
    return torch.cuda.max_memory_reserved() / 1e9 if device.is_accelerator else 0.0


def process_gb(field: str) -> float:
    """Return `VmRSS` or `VmHWM` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(f"{field}:"))


def versions() -> dict[str, str]:
    """Return those that a result depends on beside torch's."""
    try:
        return {"transformers": version("transformers")}
    except PackageNotFoundError:
        return {}


def main() -> None:
    """Run the rows that are asked for, print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--own", action="store_true", help="our decoder, also where transformers is installed"
    )
    parser.add_argument(
        "--rows", default="resident,exact,half,packed,lo16,lo8", help="some of these, comma separated"
    )
    parser.add_argument("--sequences", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed")
    parser.add_argument("--memory-gb", type=float, help="the most GPU memory of all rows but resident")
    parser.add_argument("--no-clip", action="store_true", help="without clipping")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--resident-layers", type=int, default=0, help="layers' worth of weights that stay")
    parser.add_argument("--inputs", choices=("device", "host"), default="device")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="tokens whose logits exist at once")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    rows = [row for row in args.rows.split(",") if row]
    for row in rows:
        if row not in ("resident", *STATES):
            parser.error(f"--rows has {row!r}; expected some of resident, {', '.join(STATES)}")
    device = Device.available()
    setting = Setting(
        args.model,
        args.sequences,
        16 if args.model == "tiny" else args.tokens,
        args.steps,
        device,
        None if args.no_clip else 1.0,
        args.prefetch,
        args.resident_layers,
        args.inputs,
        args.own,
        args.chunk_tokens,
    )
    report: dict[str, Any] = {
        "machine": {**machine(device), **versions()},
        "setting": {**vars(args), "out": str(args.out), "tokens": setting.tokens},
        "rows": [],
    }
    print(json.dumps(report["machine"]), flush=True)
    baseline: float | None = None
    for row in rows:
        try:
            result = measure(row, setting, args.memory_gb)
        except (MemoryError, torch.OutOfMemoryError) as error:
            result = {"row": row, "failed": str(error).splitlines()[0]}
        if row == "resident":
            baseline = result.get("step_s")
        if baseline is not None and "step_s" in result:
            result["ratio"] = result["step_s"] / baseline
        report["rows"].append(result)
        print(json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))
    print()
    print_table([{k: v for k, v in result.items() if k != "losses"} for result in report["rows"]])


if __name__ == "__main__":
    main()
