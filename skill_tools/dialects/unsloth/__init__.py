"""Unsloth: LoRA in a Python script, whose two calls say what waits on the host; a Trainer's arguments say the rest.

- load: `FastLanguageModel.from_pretrained` and those of its like; peft: `get_peft_model` of the same classes
- swapped layers: frozen decoder layers in pinned memory, brought for their forward and again for their backward
"""

UNSLOTH = "unsloth"
EMBEDDED = (UNSLOTH,)  # what a draft embeds that may hold such calls
LOAD, PEFT = "from_pretrained", "get_peft_model"
