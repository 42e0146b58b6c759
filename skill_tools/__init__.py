"""Knows training configurations: reads them, lints them, plans an offload, diagnoses a failed run.

Imports no torch and writes no file unless told to. `reference_impl` is the package that moves tensors; the
one arrow between the two is a plan, a JSON document described by `schema/plan.schema.json`.
"""

__version__ = "0.1.0"
