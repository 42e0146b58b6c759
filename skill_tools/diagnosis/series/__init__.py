# SPDX-License-Identifier: Apache-2.0
"""Reads the counts of a log as series, and finds anomalies in them. Explained in docs/design.md.

`metrics` → `anomalies` → `numbers` (known faults with such anomalies) → `wrong_numbers` (the answer about a run without
a failure). `around` and `inert` read figures and the log's own lines about an offload without effect.
"""
