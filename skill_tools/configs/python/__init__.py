"""Reads Python recipes without running them."""
