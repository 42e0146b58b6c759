# SPDX-License-Identifier: Apache-2.0
"""Searches for the best plan: candidates that are legal, ranked under budgets. See docs/choosing.md.

- candidate: one way to run, in the dialect's own settings (`dialects.candidates`)
- legality: the linter's rules about a candidate: rules that exclude it, rules to watch, and the deciding unset keys
- option: a candidate with its predicted memory and time, held against the budgets
- floor: the option with the least needs, for an answer when nothing fits
- sensitivity: the answer under another budget, sequence, micro-batch or link
- situation: a row of the card's decision table, for when no shape is known
"""
