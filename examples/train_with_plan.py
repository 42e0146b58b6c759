# SPDX-License-Identifier: Apache-2.0
"""Train a small decoder with a plan from `offload plan`.

    offload plan --model llama-3-8b --gpu-memory 80GiB --format json > plan.json
    python examples/train_with_plan.py plan.json

It needs `cpu_offloading`, installed (`pip install -c constraints.txt '.[reference]'`) or through `PYTHONPATH=.`.
A plan's amounts fit its model, and `apply_plan` refuses one of another size. This script only shows the mechanisms: it
takes the mechanisms from a plan of one GPU for any model, and trains adapters where the plan streams frozen layers.
Without a GPU plan with `--without activation-budget`: that offload counts a GPU's memory.
"""

import argparse
from pathlib import Path

import torch

from cpu_offloading import apply_plan
from cpu_offloading.tiny import Decoder, DecoderShape, add_lora
from reference_impl.verification.plan_document import execute_section

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("plan", type=Path, help="the output of `offload plan --framework pytorch --format json`")
path = parser.parse_args().plan
try:
    plan = {"execute": execute_section(path)}
except (OSError, ValueError) as error:
    parser.error(str(error))
if "sharding" in plan["execute"]:
    parser.error("the plan is for several processes; try train_sharded.py, or offload plan --gpus 1")

device = "cuda" if torch.cuda.is_available() else "cpu"
model = Decoder(DecoderShape(layers=32))
if "weights" in plan["execute"]:
    add_lora(model)
model.to(device)
trained = [param for param in model.parameters() if param.requires_grad]
ids = torch.randint(0, 512, (2, 768), device=device)

with apply_plan(model, torch.optim.AdamW(trained, lr=1e-3), plan) as applied:
    for step in range(3):
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
