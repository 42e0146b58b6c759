# SPDX-License-Identifier: Apache-2.0
"""Searches for the best plan: candidates that are legal, ranked under budgets. See docs/choosing.md.

- candidate: one way to run, in the dialect's own settings (`dialects.candidates`)
- legality: the linter's rules about a candidate: those that rule it out, those to watch, which unset keys decide
- option: a candidate with its predicted memory and time, held against the budgets
- floor: the option that needs the least, for an answer where nothing fits
- sensitivity: the answer under another budget, sequence, micro-batch or link
- situation: a row of the card's decision table, for when no shape is known
"""
