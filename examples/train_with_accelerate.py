# SPDX-License-Identifier: Apache-2.0
"""Train in a loop of Accelerate, its optimizer and activations offloaded by one line after `prepare`.

pip install -c constraints.txt '.[reference,trainers]'
python examples/train_with_accelerate.py
"""

import torch

from cpu_offloading import HybridDeviceOptimizer
from cpu_offloading.integrations.accelerate import offload

try:
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

accelerator = Accelerator(gradient_accumulation_steps=2)
shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randint(0, 512, (32, 64)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

with offload(accelerator, model, optimizer, activations={"mode": "checkpoint", "min_bytes": 1}) as offloading:
    for ids in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            if accelerator.sync_gradients:
                print(f"norm {accelerator.clip_grad_norm_(model.parameters(), 1.0):.4f}")
            optimizer.step()
            optimizer.zero_grad()
    print(offloading.report)
