# SPDX-License-Identifier: Apache-2.0
"""Megatron's DistributedOptimizer with its own HybridDeviceOptimizer and with ours, in one process group.

Two GPUs of 80 GB, with a release of megatron-core that `tests/megatron/fetch.py` has unpacked:

    torchrun --standalone --nproc-per-node 2 benchmarks/megatron_distributed.py .megatron-core/0.16.1 --out m.json

A row is training of a bf16 decoder under Megatron's DistributedDataParallel: forward, backward, `finish_grad_sync`,
step with clipping, all states of a rank's shard on the CPU. Both rows begin with the same weights, see the same batches
and print the losses and gradient norms of each step. A time is the median of the steps after warming up on the slowest
rank, in seconds; every step ends with the host waiting for the GPU, because Megatron's does. `--steps` are those timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine, print_table
from torch import nn

from reference_impl.device import Device
from reference_impl.optimizers.megatron import HybridDeviceOptimizer
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

PUBLISHED = DecoderShape(hidden=2048, ffn=5632, layers=24, heads=16, vocab=32000)
TINY = DecoderShape(hidden=64, ffn=176, layers=2, heads=4, vocab=256)
THEIRS, OURS = "megatron", "ours"
WARM_UP = 2


class Training:
    """A decoder under Megatron's DistributedDataParallel, and Megatron's optimizer for it."""

    def __init__(self, shape: DecoderShape, device: Device) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(0)
        self.device = device
        model: nn.Module = Decoder(shape).to(device.torch_device, torch.bfloat16)
        self.parallel = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            model,
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            overlap_cpu_optimizer_d2h_h2d=True,
        )
        config.pin_cpu_grads = config.pin_cpu_params = device.pins_host_memory
        self.optimizer = get_megatron_optimizer(config, [self.parallel])

    def step(self, ids: torch.Tensor) -> tuple[float, float]:
        """Train on `ids` and return the loss and the norm of all gradients, once all is done."""
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = decoder_loss(self.parallel(ids), ids)
        loss.backward()
        self.parallel.finish_grad_sync()
        _, norm, _ = self.optimizer.step()
        self.device.synchronize()
        return float(loss), float(norm)


def measure(shape: DecoderShape, device: Device, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Train and return this rank's times in seconds, peak in GB (0 on the CPU twin), losses and norms."""
    gc.collect()
    if device.allocator:
        torch.cuda.empty_cache()
    training = Training(shape, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times, losses, norms = [], [], []
    for step in range(WARM_UP + steps):
        ids = torch.randint(0, shape.vocab, (batch, tokens), generator=generator).to(device.torch_device)
        if step == WARM_UP and device.allocator:
            device.allocator.reset_peak()
        dist.barrier()
        begun = time.perf_counter()
        loss, norm = training.step(ids)
        times.append(time.perf_counter() - begun)
        losses.append(loss)
        norms.append(norm)
    return {
        "first_step_s": times[0],
        "step_s": statistics.median(times[WARM_UP:]),
        "peak_gb": device.allocator.peak_bytes / 1e9 if device.allocator else 0.0,
        "losses": losses,
        "norms": norms,
    }


def use(optimizer_class: type) -> None:
    """Have Megatron build `optimizer_class` where its configuration asks for optimizer offload."""
    import megatron.core.optimizer as theirs
    from megatron.core.optimizer import distrib_optimizer

    theirs.HybridDeviceOptimizer = distrib_optimizer.HybridDeviceOptimizer = optimizer_class


def main() -> None:
    """Run both rows; rank 0 prints the table and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release", type=Path, help="the folder of an unpacked megatron-core")
    parser.add_argument("--tiny", action="store_true", help="toy size")
    parser.add_argument("--sequences", type=int, default=4, help="of a rank and step")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed")
    parser.add_argument("--out", type=Path, help="write all numbers of all ranks as JSON")
    args = parser.parse_args()
    sys.path[:0] = [str(args.release), str(args.release.parent / "extras")]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = Device.available()
    dist.init_process_group("nccl" if device.is_accelerator else "gloo")
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Theirs

    # The precision-aware optimizer asks for a release of Transformer Engine, and uses nothing of it on the CPU.
    optimizer_config.is_te_min_version = lambda _: True
    parallel_state.initialize_model_parallel()
    shape, tokens = (TINY, 32) if args.tiny else (PUBLISHED, args.tokens)
    report: dict[str, Any] = {"machine": machine(device), "release": args.release.name, "rows": {}}
    for name, optimizer_class in ((THEIRS, Theirs), (OURS, HybridDeviceOptimizer)):
        use(optimizer_class)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, measure(shape, device, args.sequences, tokens, args.steps))
        report["rows"][name] = found
    if dist.get_rank() == 0:
        print(json.dumps(report["machine"]))
        print_table([summary(name, ranks) for name, ranks in report["rows"].items()])
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()


def summary(name: str, ranks: list[dict[str, Any]]) -> dict[str, object]:
    """Return a line of the table: the slowest rank, the largest peak, the last loss of rank 0."""
    return {
        "row": name,
        "step_s": max(rank["step_s"] for rank in ranks),
        "first_step_s": max(rank["first_step_s"] for rank in ranks),
        "peak_gb": max(rank["peak_gb"] for rank in ranks),
        "loss": ranks[0]["losses"][-1],
        "norm": ranks[0]["norms"][-1],
    }


if __name__ == "__main__":
    main()
