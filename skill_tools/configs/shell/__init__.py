"""Reads launch scripts without running them."""
