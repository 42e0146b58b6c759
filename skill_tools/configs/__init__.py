"""Reads Megatron Bridge, Megatron-LM and Axolotl configurations into one `Config`."""
