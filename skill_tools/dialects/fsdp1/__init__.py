"""FSDP1 in a plain script: `FullyShardedDataParallel` with CPUOffload, in a loop that needs no trainer.

- python_script: what is offloaded, how often the loop steps, what clips
"""

FSDP1 = "fsdp1"
WRAPPER, OFFLOAD = "FullyShardedDataParallel", "CPUOffload"
