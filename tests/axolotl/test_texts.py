"""The words that a rule quotes stand in the sources of exactly the releases that the rule names."""

import ast
from functools import cache

import pytest
from axolotl_releases import FOLDER, installed

from skill_tools.rules.knowledge import Rule, load_rules_yaml
from skill_tools.rules.versions import admits

pytestmark = pytest.mark.axolotl

# pydantic makes these sentences from a field's type; `test_against_schema` compares them.
FROM_A_TYPE = "Input should be"
QUOTING = [
    rule
    for rule in load_rules_yaml()
    if rule.raises and rule.evidence.ref.startswith("axolotl/") and not rule.raises[0].startswith(FROM_A_TYPE)
]

# Written in these releases, and never reached: an AttributeError of the same check comes first.
UNREACHED = {"ax-ebft-strided-flex": {"0.17.0", "0.18.0"}}


@cache
def texts(version: str) -> str:
    """All string literals of one release; what an f-string fills in and what `%s` stands for is `{..}`."""
    found = []
    for path in sorted((FOLDER / version / "axolotl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{..}" for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found).replace("%s", "{..}")


@pytest.mark.parametrize("rule", QUOTING, ids=lambda rule: rule.id)
def test_a_quoted_text_is_in_exactly_the_releases_of_its_rule(rule: Rule) -> None:
    if not installed():
        pytest.skip("needs released Axolotl sources: make test-axolotl")
    has = {
        version
        for version in installed()
        if any(text.removesuffix("{..}") in texts(version) for text in rule.raises)
    }
    named = {
        version for version in installed() if all(admits(one, version) for one in rule.versions.values())
    }
    assert has - UNREACHED.get(rule.id, set()) == named
