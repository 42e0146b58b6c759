# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF: PPO and its relatives beside vLLM, and SFT, DPO and reward models, all on DeepSpeed.

- sleep: vLLM's weights and DeepSpeed's states are on the host while the other side has the GPU
- colocated: describes models and engines that share one GPU
"""

OPENRLHF = "openrlhf"
