"""slime: RL on Megatron-LM beside SGLang, whose command line has Megatron-LM's flags and its own.

- colocated: trainer and engines share the GPUs, and each leaves them while the other works
"""

SLIME = "slime"
OWN_OPTIONS = (
    "--rollout-batch-size", "--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--actor-num-gpus-per-node",
    "--actor-num-nodes", "--num-rollout", "--colocate", "--sglang-mem-fraction-static", "--rollout-max-response-len",
    "--n-samples-per-prompt", "--offload-train", "--offload-rollout", "--hf-checkpoint", "--ref-load",
)  # fmt: skip
