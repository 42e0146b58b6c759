# SPDX-License-Identifier: Apache-2.0
"""SkyRL: RL and SFT on FSDP2 or Megatron beside vLLM, whose programs take `a.b=c` over dataclasses.

- worker: a trained or frozen model with GPUs of its own or shared ones: policy, critic, ref
- manual offload: weights and states are moved out and back between phases, not while they train
"""

SKYRL = "skyrl"
