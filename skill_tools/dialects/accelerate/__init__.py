# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its configuration file, and the options of `accelerate launch` on top of it.

- section: the settings of the file and of the launcher's options; its keys are canonical under `accelerate.` wherever
  they stand
- active: describes the section read by the launcher: that of its distributed type, or of its flag
"""

ACCELERATE = "accelerate"
SCRIPT = f"{ACCELERATE}.script"  # a key: a Python script makes the Accelerator, and its plugins read no file
DEEPSPEED = f"{ACCELERATE}.deepspeed_config."  # the prefix of keys in the section for DeepSpeed's plugin
FSDP_PLUGIN, DEEPSPEED_PLUGIN, ACCELERATOR = (
    "FullyShardedDataParallelPlugin",
    "DeepSpeedPlugin",
    "Accelerator",
)
OUR_MODULE = r"\b(?:cpu_offloading|reference_impl)\.integrations\.accelerate\b"  # our line in it
EMBEDDED = (ACCELERATE, "deepspeed")  # dialects with sections in a draft
