"""Reads the counts of a log as series, and finds anomalies in them. Explained in docs/design.md.

`metrics` → `anomalies` → `numbers` (known faults that give them) → `wrong_numbers` (what an answer says of a run that
nothing ended). `around` and `inert` read what figures and the log's own lines say of an offload without effect.
"""
