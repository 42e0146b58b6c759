# SPDX-License-Identifier: Apache-2.0
"""Prefer one answer to another with TRL's DPOTrainer, its optimizer and activations offloaded by one line.

pip install -c constraints.txt '.[reference,trainers]'
python examples/train_with_trl.py
"""

import tempfile

from cpu_offloading.integrations.transformers import offload

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "why": 2, "because": 3, "never": 4}, "<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
model, reference = (LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape)) for _ in range(2))
rows = Dataset.from_list([{"prompt": "why", "chosen": " because", "rejected": " never"}] * 32)

with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(folder, max_steps=4, logging_steps=1, bf16=False, report_to=[])
    trainer = DPOTrainer(model, reference, args, train_dataset=rows, processing_class=tokenizer)
    with offload(trainer, optimizer=True, activations={"mode": "checkpoint", "min_bytes": 1}) as offloading:
        trainer.train()
        print(offloading.report)
