# SPDX-License-Identifier: Apache-2.0
"""The rules with their examples, as their files are now, and the lint of an example."""

from shipped import RULES

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_sources
from skill_tools.rules.finding import LintResult, Severity
from skill_tools.rules.knowledge import Rule

# An example is a rule and one of its frameworks.
CASES = [(rule, framework) for rule in RULES for framework in rule.examples]


def name_of(case: tuple[Rule, str]) -> str:
    rule, framework = case
    return f"{rule.id} for {framework}"


def config_of(text: str, rule: Rule, framework: str) -> Config:
    filename = rule.examples[framework].filename
    if filename == "<overrides>":
        return read([], overrides=text.split("\n"), framework=framework)
    return read_sources([Source(filename, text)], framework=framework)


SLOW = {rule.id for rule in RULES if rule.effect in ("slow", "out-of-memory")}


def serious(verdict: LintResult) -> set[str]:
    """The rules behind the errors and warnings of a verdict.

    An offload that works now may be slow, and settings of a recipe or a shell cannot be written here: neither counts.
    """
    certain = (one for one in verdict.findings if one.severity is not Severity.INFO and not one.unless)
    return {finding.rule for finding in certain} - SLOW
