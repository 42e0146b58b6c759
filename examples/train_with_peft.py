# SPDX-License-Identifier: Apache-2.0
"""Train PEFT's adapters on a base model that streams from the host, by one line.

pip install -c constraints.txt '.[reference,trainers]'
python examples/train_with_peft.py
"""

import tempfile

import torch

from cpu_offloading.integrations.transformers import offload

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape))
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (32, 64))]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=4, logging_steps=1, learning_rate=1e-3, report_to=[])
    trainer = Trainer(model, args, train_dataset=rows)
    with offload(trainer, weights={"prefetch": 1}, activations="recompute") as offloading:
        trainer.train()
        trainer.save_model(folder)  # the adapters, as usual
        print(offloading.report)
