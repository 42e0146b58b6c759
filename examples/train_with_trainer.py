# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with Transformers' Trainer, its optimizer and activations offloaded by one line.

    pip install -c constraints.txt '.[reference,trainers]'
    python examples/train_with_trainer.py

Nothing is downloaded: the model is random, and so is the text.
"""

import tempfile

import torch

from cpu_offloading.integrations.transformers import offload

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (64, 64))]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=6, logging_steps=1, learning_rate=1e-3, report_to=[])
    trainer = Trainer(model, args, train_dataset=rows)
    with offload(
        trainer, optimizer=True, activations={"mode": "checkpoint", "min_bytes": 2**16}
    ) as offloading:
        trainer.train()
        print(offloading.report)
