"""Searches for the best plan: candidates that are legal, ranked under budgets. See docs/choosing.md.

- candidate: one way to run, in the dialect's own settings (`dialects.candidates`)
- legality: what the linter's rules say of a candidate: what rules it out, what to watch, which unset keys decide
- option: a candidate with its predicted memory and time, held against the budgets
- floor: the option that needs the least, for an answer where nothing fits
- sensitivity: what another budget, sequence, micro-batch or link would change
- situation: a row of the card's decision table, for when no shape is known
"""
