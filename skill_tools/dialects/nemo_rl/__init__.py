# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL: YAML with parents (`defaults:`), and Hydra overrides on top of it.

- parent: the file that a configuration names under `defaults`, read first
- backend: the trainer of the policy, DTensor or Megatron
"""

NEMO_RL = "nemo-rl"
