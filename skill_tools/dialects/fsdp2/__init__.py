# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in a plain script: `fully_shard` with an offload policy, in a loop that needs no trainer.

- python_script: the policy, the backend of the process group, the clipping, and this project's optimizers beside it
"""

FSDP2 = "fsdp2"
SHARDS, POLICY = "fully_shard", "CPUOffloadPolicy"
