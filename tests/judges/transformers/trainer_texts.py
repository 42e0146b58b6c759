# SPDX-License-Identifier: Apache-2.0
"""Errors of transformers whose text no rule can quote, and whether a text is a rule's."""

import re

from skill_tools.rules.knowledge import Rule

# Said by Python, torch or pydantic, not by a text that a rule could quote.
_SAID_OTHERWISE = {
    "hf-unknown-argument": "got an unexpected keyword argument",
    "trl-unknown-argument": "got an unexpected keyword argument",
    "trl-ao-where": "got an unexpected keyword argument",
    "hf-arguments-gone-4": "got an unexpected keyword argument",
    "hf-arguments-gone-5.0": "got an unexpected keyword argument",
    "hf-arguments-gone-5.2": "got an unexpected keyword argument",
    "hf-arguments-gone-5.15": "got an unexpected keyword argument",
    "hf-arguments-new-5.23": "got an unexpected keyword argument",
    "hf-fsdp-backward-prefetch": "KeyError: 'PRE'",
    "hf-fsdp1-reshard": r"KeyError: '(TRUE|FALSE)'",
    "hf-fsdp-state-dict-type": "KeyError|FSDP2 does not support LOCAL_STATE_DICT",
    "hf-optim-apex": "is not a valid OptimizerNames",
    "hf-fsdp2-reshard": "invalid truth value",
}


def says(rule: Rule, text: str) -> bool:
    """Whether `text` is the text that the framework prints by the rule; `{..}` stands for anything."""
    if rule.id in _SAID_OTHERWISE and re.search(_SAID_OTHERWISE[rule.id], text):
        return True
    patterns = (re.escape(one).replace(re.escape("{..}"), ".*") for one in rule.raises)
    return any(re.search(pattern, text, re.DOTALL) for pattern in patterns)
