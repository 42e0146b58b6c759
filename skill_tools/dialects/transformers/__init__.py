# SPDX-License-Identifier: Apache-2.0
"""Transformers: the arguments of its Trainer and of TRL's, as recipes, command lines and Python scripts give them.

- arguments: the fields of `TrainingArguments`, of its subclasses (`SFTConfig`) and of the dataclasses parsed with them
- recipe: arguments in a YAML or JSON file, as `TrlParser` and `HfArgumentParser` read them
- python_script: the arguments made by a Python script, or a trainer without any; our_line: `offload(trainer)`
- launch: a command that starts a training script; words before the script are the launcher's
"""

TRANSFORMERS = "transformers"
EMBEDDED = ("accelerate", "deepspeed", "unsloth")  # dialects with sections in the arguments
CLASS = "arguments_class"  # the key of the arguments' class, if known
LAUNCHER = "launcher"
LENGTH = "sequence_len"  # the key of the tokens in a sequence; its override where the class has no argument for it:
OF_THE_SCRIPT = "seq_length"
PACKAGES = ("transformers", "trl")  # the packages of these classes
# Together they are the Trainer's alone: the sharding engine, and the batch under its own name.
ENGINES, BATCH = frozenset({"deepspeed", "fsdp", "fsdp_config"}), "per_device_train_batch_size"
TRAINER_CLASSES = frozenset({"TrainingArguments", "Seq2SeqTrainingArguments"})
TRL_COMMANDS = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "grpo": "GRPOConfig",
    "kto": "KTOConfig",
    "reward": "RewardConfig",
    "rloo": "RLOOConfig",
    "distillation": "DistillationConfig",
}
# A program of TRL itself; unlike its command it drops arguments that it does not know.
TRL_SCRIPT = rf"\btrl[/.]scripts[/.](?:{'|'.join(TRL_COMMANDS)})\b"
TRL_CLASSES = frozenset(
    {*TRL_COMMANDS.values(), "CPOConfig", "GKDConfig", "GOLDConfig", "OnlineDPOConfig", "ORPOConfig"}
)
CLASSES = TRAINER_CLASSES | TRL_CLASSES
# The defaults of a trainer that is given no arguments.
TRAINERS = {
    "Trainer": "TrainingArguments",
    "SFTTrainer": "SFTConfig",
    "DPOTrainer": "DPOConfig",
    "GRPOTrainer": "GRPOConfig",
    "KTOTrainer": "KTOConfig",
    "RewardTrainer": "RewardConfig",
    "RLOOTrainer": "RLOOConfig",
    "DistillationTrainer": "DistillationConfig",
}
