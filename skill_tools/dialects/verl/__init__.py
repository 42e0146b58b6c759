# SPDX-License-Identifier: Apache-2.0
"""verl: Hydra overrides of `verl.trainer.main_ppo` and its SFT trainer, and YAML of the same keys.

- role: actor, reference model or critic, each with an engine of its own
- engine: the trainer of a role: FSDP, Megatron, VeOmni, torchtitan, Automodel
- closed: describes a mapping whose keys an override can only change; `+key` adds one
"""

VERL = "verl"
