# SPDX-License-Identifier: Apache-2.0
"""FSDP1 in a plain script: `FullyShardedDataParallel` with CPUOffload, in a loop that needs no trainer.

- python_script: the offloads, how often the loop steps, the clipping
"""

FSDP1 = "fsdp1"
WRAPPER, OFFLOAD = "FullyShardedDataParallel", "CPUOffload"
