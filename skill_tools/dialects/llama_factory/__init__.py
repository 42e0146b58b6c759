# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory: one YAML of flat arguments, its own and the Trainer's, and the DeepSpeed file that it may name.

- stage: the kind of training (`sft`, `dpo`, ...); not ZeRO's stage, which is DeepSpeed's
- unsloth's checkpointing (`use_unsloth_gc`): checkpointing whose kept inputs wait on the host
"""

LLAMA_FACTORY = "llama-factory"
