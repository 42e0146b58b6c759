"""Reads what a log counts as series, and says what is wrong with them. Explained in docs/design.md.

`metrics` → `anomalies` → `numbers` (known faults that give them) → `wrong_numbers` (what an answer says of a run that
nothing ended).
"""
