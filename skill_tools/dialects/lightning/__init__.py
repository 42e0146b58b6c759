# SPDX-License-Identifier: Apache-2.0
"""Lightning: Python scripts with a Trainer or Fabric, and a strategy that shards or offloads.

- python_script: the strategy and its arguments; DeepSpeed's arguments become the JSON that the strategy makes
"""

LIGHTNING = "lightning"
STRATEGY = "lightning.strategy"
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
MAKERS = ("Trainer", "Fabric")
FSDP_STRATEGY, DEEPSPEED_STRATEGY, PARALLEL_STRATEGY = (
    "FSDPStrategy",
    "DeepSpeedStrategy",
    "ModelParallelStrategy",
)
OUR_MODULE = r"\b(?:cpu_offloading|reference_impl)\.integrations\.lightning\b"  # whose callback it may hold
EMBEDDED = ("deepspeed", "fsdp2")  # a script under ModelParallelStrategy calls fully_shard itself
