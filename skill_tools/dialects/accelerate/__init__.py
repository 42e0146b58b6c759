# SPDX-License-Identifier: Apache-2.0
"""Accelerate: its configuration file, and the options of `accelerate launch` on top of it.

- section: the settings of the file and of the launcher's options; its keys are canonical under `accelerate.` wherever
  they stand
- active: describes the section of the file that the launcher reads: that of its distributed type, or of its flag
"""

ACCELERATE = "accelerate"
SCRIPT = (
    f"{ACCELERATE}.script"  # a key: a Python script makes the Accelerator, whose plugins then read no file
)
DEEPSPEED = f"{ACCELERATE}.deepspeed_config."  # how keys of the section for DeepSpeed's plugin begin
FSDP_PLUGIN, DEEPSPEED_PLUGIN, ACCELERATOR = (
    "FullyShardedDataParallelPlugin",
    "DeepSpeedPlugin",
    "Accelerator",
)
OUR_MODULE = r"\b(?:cpu_offloading|reference_impl)\.integrations\.accelerate\b"  # whose line it may hold
EMBEDDED = (ACCELERATE, "deepspeed")  # embedded by a draft that may hold such a section
