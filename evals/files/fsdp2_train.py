"""Pretrains a 3B decoder on 8 x A100 80 GB: torchrun --nproc-per-node 8 fsdp2_train.py  (torch==2.10.0)."""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from decoder import Decoder, DecoderConfig
from packed import PackedTokens

STEPS = 60_000
WARMUP = 1_000
PEAK_LR = 3e-4


def learning_rate(step: int) -> float:
    """Linear warm-up, then a linear decay to a tenth."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    return PEAK_LR * (1.0 - 0.9 * (step - WARMUP) / (STEPS - WARMUP))


def sharded_model(mesh) -> torch.nn.Module:
    config = DecoderConfig(layers=28, hidden=3072, heads=24, kv_heads=8, vocabulary=128_256)
    with torch.device("meta"):
        model = Decoder(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    model.reset_parameters()
    return model


def main() -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(17)

    model = sharded_model(init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    tokens = PackedTokens("/data/c4", sequence=4096)
    batches = DataLoader(
        tokens, batch_size=4, sampler=DistributedSampler(tokens), num_workers=4, pin_memory=True
    )

    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches):
        if step == STEPS:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        logits = model(inputs.cuda(non_blocking=True))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.cuda(non_blocking=True).flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and step % 10 == 0:
            elapsed, started = time.perf_counter() - started, time.perf_counter()
            peak = torch.cuda.max_memory_allocated() / 2**30
            held = torch.cuda.max_memory_reserved() / 2**30
            print(
                f"step {step} loss {loss.item():.3f} {elapsed / 10:.3f} s peak {peak:.2f} GiB reserved {held:.2f} GiB"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
