"""Reads Python recipes without running them. Explained in docs/design.md (decision 8).

- section: an object with fields, such as the model or the optimizer of a configuration
- doubt: what a branch that cannot be decided assigns; it is left unreadable
"""
