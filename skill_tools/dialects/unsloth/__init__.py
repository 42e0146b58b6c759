# SPDX-License-Identifier: Apache-2.0
"""Unsloth: LoRA in a Python script; its two calls say which tensors wait on the host, a Trainer's arguments the rest.

- load: `FastLanguageModel.from_pretrained` and those of its like; peft: `get_peft_model` of the same classes
- swapped layers: frozen decoder layers in pinned memory, brought for their forward and again for their backward
"""

UNSLOTH = "unsloth"
EMBEDDED = (UNSLOTH,)  # embedded by a draft that may hold such calls
LOAD, PEFT = "from_pretrained", "get_peft_model"
