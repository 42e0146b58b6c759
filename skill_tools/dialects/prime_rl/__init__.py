# SPDX-License-Identifier: Apache-2.0
"""prime-rl: TOML of an RL run (orchestrator, inference, trainer), of an SFT run, or of a trainer alone.

- kind of run: RL, SFT or a trainer alone; it decides where the trainer's keys stand in the TOML
- trainer: the part that trains; its keys are canonical under `trainer.` wherever they stand
"""

PRIME_RL = "prime-rl"
