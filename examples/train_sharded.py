# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder under FSDP2 with a plan for several GPUs, a process for each.

    offload plan --model llama-3-8b --gpu a100-80gb --gpus 2 --overrides sharding=fsdp2 --format json > plan.json
    torchrun --nproc-per-node 2 examples/train_sharded.py plan.json

It needs `cpu_offloading`, installed (`pip install -c constraints.txt '.[reference]'`) or through `PYTHONPATH=.`.
Without GPUs the processes are CPUs under gloo. As in `train_with_plan.py` the mechanisms are those of a plan for any
model.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cpu_offloading import apply_plan
from cpu_offloading.tiny import Decoder, DecoderShape
from reference_impl.verification.plan_document import execute_section

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument(
    "plan", type=Path, help="the output of `offload plan --framework pytorch --gpus 2 --format json`"
)
path = parser.parse_args().plan
try:
    plan = {"execute": execute_section(path)}
except (OSError, ValueError) as error:
    parser.error(str(error))
if "sharding" not in plan["execute"]:
    parser.error("the plan is for one process; try train_with_plan.py, or offload plan --gpus 2")
ranks = plan["execute"]["sharding"]["ranks"]
if "RANK" not in os.environ or ranks != int(os.environ["WORLD_SIZE"]):
    parser.error(
        f"the plan is for {ranks} processes; try torchrun --nproc-per-node {ranks} {parser.prog} plan.json"
    )

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
model = Decoder(DecoderShape(layers=8)).to(device, getattr(torch, plan["execute"]["sharding"]["weights"]))
for module in (*model.layers, model.embedding, model.head, model):
    fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
ids = torch.randint(0, 512, (2, 64), device=device)

with apply_plan(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan) as applied:
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
