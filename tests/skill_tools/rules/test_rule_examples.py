# SPDX-License-Identifier: Apache-2.0
"""Every rule finds its own bad example and leaves its good one alone; a fix makes its finding vanish.

Each test goes through all examples and names those that fail. Rules are read from the YAML files, so that an edit
is seen at once.
"""

from for_each import for_each
from rule_examples import CASES, config_of, name_of, serious
from shipped import KEYS, RULES

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_sources
from skill_tools.rules import suppress
from skill_tools.rules.finding import Finding, LintResult, Severity
from skill_tools.rules.fixes import repaired
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.lint import lint
from skill_tools.rules.remedies import applied, with_remedies

EDITED = (".yaml", ".yml", ".json", ".sh")
each_example = for_each(CASES, name_of)
# The input itself is at fault in the examples of the other rules.
each_of_a_condition = for_each([case for case in CASES if case[0].check != "input"], name_of)
each_fixable = for_each([case for case in CASES if case[0].fix.applicability != "manual"], name_of)


def judge(config: Config, rule: Rule, framework: str) -> LintResult:
    versions = rule.examples[framework].versions
    verdict = lint(config, rules=RULES, versions=versions, keys=KEYS)
    return suppress.apply(verdict, config, lambda: RULES)


def of_rule(verdict: LintResult, rule: Rule) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.rule == rule.id]


@each_example
def test_the_bad_example_is_found(case: tuple[Rule, str]) -> None:
    rule, framework = case
    verdict = judge(config_of(rule.examples[framework].bad, rule, framework), rule, framework)
    open_rules = [(undecided.rule, undecided.missing) for undecided in verdict.undecided]
    assert of_rule(verdict, rule), f"found {[f.rule for f in verdict.findings]}, undecided {open_rules}"


@each_example
def test_the_good_example_is_not(case: tuple[Rule, str]) -> None:
    rule, framework = case
    verdict = judge(config_of(rule.examples[framework].good, rule, framework), rule, framework)
    assert not of_rule(verdict, rule), of_rule(verdict, rule)[0].message


@each_of_a_condition
def test_an_example_is_clean_but_for_what_it_shows(case: tuple[Rule, str]) -> None:
    """No unknown key and no wrong type slips in: an example is copied by its reader."""
    rule, framework = case
    for text in (rule.examples[framework].bad, rule.examples[framework].good):
        config = config_of(text, rule, framework)
        assert not config.unknown, config.unknown
        assert not config.wrong_types, config.wrong_types


@each_example
def test_the_remedy_of_a_rule_trips_no_other(case: tuple[Rule, str]) -> None:
    """The good example and the fixed bad one have no new fault."""
    rule, framework = case
    example = rule.examples[framework]
    bad = config_of(example.bad, rule, framework)
    before = serious(judge(bad, rule, framework))
    good = judge(config_of(example.good, rule, framework), rule, framework)
    assert not serious(good) - before, "the good example"
    if rule.fix.applicability == "manual":
        return
    fixed = applied(bad, rule.fix, KEYS)
    if example.filename.endswith(EDITED):
        sources = [Source(name, text) for name, text in repaired(bad, rule.fix, KEYS).items()]
        fixed = read_sources(sources, framework=framework)
    assert not serious(judge(fixed, rule, framework)) - before, "the fix"


@each_fixable
def test_a_fix_makes_its_finding_vanish(case: tuple[Rule, str]) -> None:
    rule, framework = case
    config = config_of(rule.examples[framework].bad, rule, framework)
    versions = rule.examples[framework].versions
    verdict = judge(config, rule, framework)
    shown = with_remedies(verdict, config, versions=versions, edits=True, rules=RULES, keys=KEYS)
    (finding, *_) = of_rule(shown, rule)
    assert finding.fix.diff, "a safe or unsafe fix shows its change"
    texts = repaired(config, rule.fix, KEYS)
    name = rule.examples[framework].filename
    if not texts:
        assert not name.endswith((".yaml", ".yml", ".json")), "the fix of a YAML or JSON file can be applied"
        return
    assert name.endswith(EDITED), "nothing else is edited"
    sources = [Source(name, texts[name]) for name in texts]
    fixed = judge(read_sources(sources, framework=framework), rule, framework)
    assert not of_rule(fixed, rule)
    there = {each.rule for each in verdict.findings}
    new = {each.rule for each in fixed.findings if each.severity is not Severity.INFO} - there
    assert new == {each.rule for each in finding.after}, "its consequences are reported with it"
