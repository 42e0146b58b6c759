"""prime-rl: TOML of an RL run (orchestrator, inference, trainer), of an SFT run, or of a trainer alone."""

PRIME_RL = "prime-rl"
