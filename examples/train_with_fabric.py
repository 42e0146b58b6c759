# SPDX-License-Identifier: Apache-2.0
"""Train in a loop of Lightning's Fabric, which needs no adapter.

pip install -c constraints.txt '.[reference,trainers]'
python examples/train_with_fabric.py
"""

import torch

from cpu_offloading import CheckpointOffloader, HybridDeviceOptimizer
from cpu_offloading.tiny import Decoder, DecoderShape, decoder_loss

try:
    from lightning import Fabric
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

fabric = Fabric(devices=1)
model = Decoder(DecoderShape())
optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-3)
module, stepped = fabric.setup(model, optimizer)
optimizer.attach(module)

with CheckpointOffloader(module.module, min_bytes=1) as offloader:
    for step in range(4):
        ids = torch.randint(0, 512, (4, 64), device=fabric.device)
        fabric.backward(decoder_loss(module(ids), ids))
        print(f"step {step}: norm {fabric.clip_gradients(module, stepped, max_norm=1.0):.4f}")
        stepped.step()
        stepped.zero_grad()
    print(f"{offloader.offloaded_bytes} bytes of activations left the device")
optimizer.close()
