"""Axolotl: its YAML, the DeepSpeed files that it names, and its command line."""
