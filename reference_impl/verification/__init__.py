"""The small model, the probe, the verifier and `apply_plan`: what uses the mechanisms together."""
