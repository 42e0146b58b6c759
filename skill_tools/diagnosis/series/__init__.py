# SPDX-License-Identifier: Apache-2.0
"""Reads the counts of a log as series, and finds anomalies in them. Explained in docs/design.md.

`metrics` → `anomalies` → `numbers` (known faults that give them) → `wrong_numbers` (the answer about a run that
nothing ended). `around` and `inert` read figures and the log's own lines about an offload without effect.
"""
