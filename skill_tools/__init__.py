# SPDX-License-Identifier: Apache-2.0
"""Knows training configurations: reads them, lints them, plans an offload, diagnoses a failed run.

Imports no torch and writes no file unless told to. `reference_impl` is the package that moves tensors; only a plan
passes between the two, a JSON document described by `schema/plan.schema.json`. Explained in docs/design.md.
"""

__version__ = "0.10.0"
