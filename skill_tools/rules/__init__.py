# SPDX-License-Identifier: Apache-2.0
"""The engine that checks a configuration against the rules in `knowledge/rules/`. Explained in docs/design.md.

- rule: one fact, with the condition under which a configuration breaks it
- condition: a small expression over canonical keys, true, false or unknown
- scope: the reading of a condition: the value of each key, set or by default
- finding: one rule that a configuration breaks, with its place; undecided: one that an unknown value leaves open
- lint result: the findings of one configuration in a stable order, and the rules that stayed undecided
- fix: a change that removes a finding; safe, unsafe (may change a run's results) or manual (a choice, never made
  here)
- remedy: a finding's fix as it is shown, with the findings caused by it
- suppression: a comment with a reason, which removes a finding
- standing: the comparison of a rule's releases with the user's
"""
