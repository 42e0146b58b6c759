# SPDX-License-Identifier: Apache-2.0
"""slime and miles, which began as its fork: RL on Megatron-LM beside SGLang, with Megatron-LM's flags and their own.

- colocated: trainer and engines share the GPUs, and each leaves them while the other works
"""

SLIME = "slime"
MILES = "miles"
OWN_OPTIONS = (
    "--rollout-batch-size", "--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--actor-num-gpus-per-node",
    "--actor-num-nodes", "--num-rollout", "--colocate", "--sglang-mem-fraction-static", "--rollout-max-response-len",
    "--n-samples-per-prompt", "--offload-train", "--offload-rollout", "--hf-checkpoint", "--ref-load",
)  # fmt: skip
