"""Megatron-LM and Megatron Bridge: launch scripts, recipes, overrides and saved run configurations."""
