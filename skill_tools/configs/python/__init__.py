# SPDX-License-Identifier: Apache-2.0
"""Reads Python recipes without running them. Explained in docs/design.md (decision 8).

- section: an object with fields, such as the model or the optimizer of a configuration
- doubt: the values that an undecided branch assigns; they are left unreadable
"""
