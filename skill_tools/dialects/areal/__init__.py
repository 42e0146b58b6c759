# SPDX-License-Identifier: Apache-2.0
"""AReaL: asynchronous RL, SFT, DPO and reward models on FSDP2, Megatron or Archon, from YAML and Hydra's overrides.

- role: a model with an engine of its own: actor, critic, ref, teacher
- kind: the training of the run, after the sections of its file: ppo, dpo, or train for SFT and reward models
"""

AREAL = "areal"
