# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop, planned with the mechanisms of `reference_impl`. It has settings to plan with, and no files.

- setting: a plain name that `--overrides` takes: `seq_length`, `lora_rank`, or a size of the model
- sharding: whether FSDP2 shards the model over several GPUs, or each has a replica; shard_dtype: that of the shards
- execute: the section of a plan that `reference_impl.apply_plan` carries out; there are no settings to patch
"""

PYTORCH = "pytorch"

# Values of the setting `optimizer`.
ADAMW, MUON = "adamw", "muon"
