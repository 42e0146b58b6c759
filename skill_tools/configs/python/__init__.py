"""Reads Python recipes without running them.

- section: an object with fields, such as the model or the optimizer of a configuration
- doubt: what a branch that cannot be decided assigns; it is left unreadable
"""
