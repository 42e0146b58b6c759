# SPDX-License-Identifier: Apache-2.0
"""A rule's quoted words stand in the sources of exactly the rule's releases."""

import ast
import re
from functools import cache

import pytest
from axolotl_releases import FOLDER, installed
from for_each import for_each
from shipped import RULES

from skill_tools.rules.knowledge import Rule
from skill_tools.rules.versions import admits

pytestmark = pytest.mark.axolotl

# pydantic makes these sentences from a field's type; `test_against_schema` compares them.
FROM_A_TYPE = "Input should be"
# A literal that fixes fewer characters would match anything.
MIN_FIXED = 40
QUOTING = [
    rule
    for rule in RULES
    if rule.raises and rule.evidence.ref.startswith("axolotl/") and not rule.raises[0].startswith(FROM_A_TYPE)
]

# Written in these releases, and never reached: an AttributeError of the same check comes first, or the schema does not
# inherit the class of the check. Release 0.12 has the text of ax-muon-ds and ax-muon8-ds as part of a longer one.
UNREACHED = {
    "ax-ebft-strided-flex": {"0.17.0", "0.18.0"},
    "ax-ebft-strided": {"0.17.0", "0.18.0"},
    "ax-muon-ds": {"0.12.2"},
    "ax-muon8-ds": {"0.12.2"},
    "ax-tp-8bit": {"0.12.2", "0.13.2", "0.14.0", "0.15.0", "0.16.1", "0.17.0", "0.18.0", "0.19.0"},
}


@cache
def literals(version: str) -> frozenset[str]:
    """All string literals of one release; the variable parts of f-strings and of `%s` are `{..}`."""
    found = set()
    for path in sorted((FOLDER / version / "axolotl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{..}" for part in node.values)
                found.add("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("%s", "{..}"))
    return frozenset(found)


@cache
def patterns(version: str) -> tuple[re.Pattern[str], ...]:
    """The literals with something to fill in, as patterns; a rule may quote the text that fills them as well."""
    filled = (text.split("{..}") for text in literals(version) if "{..}" in text)
    enough = (parts for parts in filled if len("".join(parts)) > MIN_FIXED)
    return tuple(re.compile(".*".join(map(re.escape, parts)), re.DOTALL) for parts in enough)


def says(version: str, quoted: str) -> bool:
    """Whether the release has the words of one quote."""
    words = quoted.removesuffix("{..}")
    return any(words in text for text in literals(version)) or any(
        pattern.fullmatch(quoted) for pattern in patterns(version)
    )


@for_each(QUOTING, lambda rule: rule.id)
def test_a_quoted_text_is_in_exactly_the_releases_of_its_rule(rule: Rule) -> None:
    if not installed():
        pytest.skip("needs released Axolotl sources: make test-axolotl")
    has = {version for version in installed() if any(says(version, text) for text in rule.raises)}
    sharing = [other for other in QUOTING if set(other.raises) & set(rule.raises)]
    named = {
        version
        for version in installed()
        if any(all(admits(one, version) for one in other.versions.values()) for other in sharing)
    }
    assert has - UNREACHED.get(rule.id, set()) == named
