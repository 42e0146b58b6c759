# SPDX-License-Identifier: Apache-2.0
"""The rules of the repository, read once for all modules of tests that want them: half a second each time."""

from skill_tools.rules.knowledge import load_rules_yaml

RULES = tuple(load_rules_yaml())
