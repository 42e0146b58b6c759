# SPDX-License-Identifier: Apache-2.0
"""The rules and keys of the repository's files, read once for all test modules: half a second each time."""

from skill_tools import knowledge
from skill_tools.configs.keys import keys_from_data
from skill_tools.rules.knowledge import load_rules_yaml

KEY_ENTRIES = knowledge.load_keys()
KEYS = {key.name: key for key in keys_from_data(KEY_ENTRIES)}
RULES = load_rules_yaml()
