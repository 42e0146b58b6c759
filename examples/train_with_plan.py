"""Train a small decoder with a plan from `offload plan`.

    offload plan --model llama-3-8b --gpu-memory 80GiB --format json > plan.json
    python examples/train_with_plan.py plan.json

It needs `reference_impl`, installed (`pip install -c constraints.txt '.[reference]'`) or through `PYTHONPATH=.`.
A plan's amounts fit its model. This script only shows the mechanisms, so a plan for any model works.
"""

import sys

import torch

from reference_impl.verification.apply import apply_plan
from reference_impl.verification.model import Decoder, DecoderShape

device = "cuda" if torch.cuda.is_available() else "cpu"
model = Decoder(DecoderShape(layers=32)).to(device)
ids = torch.randint(0, 512, (2, 64), device=device)

with apply_plan(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sys.argv[1]) as applied:
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
