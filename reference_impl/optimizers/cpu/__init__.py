"""The share whose state is kept and updated on the CPU."""
