# SPDX-License-Identifier: Apache-2.0
"""No way out of a rule leads into another fault, in any release that the rule is about.

A way out is a fix, an option with one release (`deepspeed>=0.19`) or an option with one setting (`"stage": 2`). Each is
taken on the rule's bad example, for every known release of the packages that have a say in the keys it changes. Options
in words are for people; no test can take them. A written fix is also read back from the file, by the release's reader:
a release without the key, or with another type for it, shows there.
"""

import re
from collections.abc import Iterator, Mapping

import pytest
import yaml
from for_each import for_each
from rule_examples import CASES, config_of, name_of, serious
from shipped import KEYS, RULES

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_sources
from skill_tools.knowledge import index
from skill_tools.rules.finding import LintResult, Severity
from skill_tools.rules.fixes import repaired
from skill_tools.rules.knowledge import Rule, RuleFix, by_key
from skill_tools.rules.lint import lint
from skill_tools.rules.remedies import applied
from skill_tools.rules.versions import admits, canonical_name

KNOWN = index()["releases"]["known"]
READERS = by_key(RULES)
_RELEASE = re.compile(r"([a-z][a-z0-9-]*)((?:[<>=!]=?[\d.*]+,?)+)")
_SETTING = re.compile(r"""(?:export )?["']?([A-Za-z_][\w.]*)["']?\s*[:=]\s*([^\s,]+)""")

each_fix = for_each([case for case in CASES if case[0].fix.applicability != "manual"], name_of)
each_choice = for_each([case for case in CASES if case[0].fix.options and case[0].check != "input"], name_of)


def judge(config: Config, versions: Mapping[str, str]) -> LintResult:
    return lint(config, rules=RULES, versions=versions, keys=KEYS)


def releases(
    rule: Rule, config: Config, keys: set[str], stated: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield `stated` with each release of each package asked for by rules about `keys`, if `rule` applies."""
    yield dict(stated)
    asked = [each for key in keys for each in READERS.get(key, ()) if config.dialects() & {*each.dialects}]
    packages = {name for each in asked for name in each.versions} | {*rule.versions}
    for package in sorted(packages):
        for version in KNOWN.get(package, ()):
            if admits(rule.versions.get(package, ">=0"), version):
                yield {**stated, package: version}


def led_to(rule: Rule, config: Config, fix: RuleFix, stated: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the rules made true by `fix`, each with its releases."""
    fixed = applied(config, fix, KEYS)
    found: dict[str, set[str]] = {}
    for versions in releases(rule, config, {*fix.set, *fix.remove}, stated):
        before = judge(config, versions)
        if rule.id in {each.rule for each in before.findings}:
            for new in serious(judge(fixed, versions)) - serious(before):
                found.setdefault(new, set()).add(
                    ", ".join(f"{name}=={each}" for name, each in versions.items())
                )
    return found


@pytest.mark.slow
@each_fix
def test_a_fix_leads_to_no_fault_in_any_release(case: tuple[Rule, str]) -> None:
    rule, framework = case
    example = rule.examples[framework]
    found = led_to(rule, config_of(example.bad, rule, framework), rule.fix, example.versions)
    assert not found, found


def written_led_to(rule: Rule, framework: str, fix: RuleFix) -> dict[str, set[str]]:
    """Return the result of `led_to` for the fixed files, by each release's own reader."""
    example = rule.examples[framework]
    config = config_of(example.bad, rule, framework)
    found: dict[str, set[str]] = {}
    of_reader = [{**example.versions, framework: each} for each in KNOWN.get(framework, ())]
    for versions in (*releases(rule, config, {*fix.set, *fix.remove}, example.versions), *of_reader):
        before = read_as(versions, {example.filename: example.bad}, framework)
        verdict = judge(before, versions)
        texts = repaired(before, fix, KEYS) if rule.id in {each.rule for each in verdict.findings} else {}
        if texts:
            for new in serious(judge(read_as(versions, texts, framework), versions)) - serious(verdict):
                found.setdefault(new, set()).add(str(versions))
    return found


def read_as(versions: Mapping[str, str], texts: Mapping[str, str], framework: str) -> Config:
    sources = [Source(name, text).stating(lambda: versions) for name, text in texts.items()]
    return read_sources(sources, framework=framework)


each_written_fix = for_each(
    [
        (rule, framework)
        for rule, framework in CASES
        if rule.fix.applicability != "manual" and rule.examples[framework].filename != "<overrides>"
    ],
    name_of,
)


@pytest.mark.slow
@each_written_fix
def test_a_written_fix_leads_to_no_fault_in_any_release(case: tuple[Rule, str]) -> None:
    rule, framework = case
    found = written_led_to(rule, framework, rule.fix)
    assert not found, found


def test_a_fix_that_leads_to_a_fault_is_seen() -> None:
    rule = next(
        rule for rule, framework in CASES if (rule.id, framework) == ("ax-fsdp-offload-8bit", "axolotl")
    )
    example = rule.examples["axolotl"]
    config = config_of(example.bad, rule, "axolotl")
    refused = RuleFix("safe", "", set={"fsdp_config.cpu_offload_pin_memory": False})
    assert led_to(rule, config, refused, example.versions).keys() == {"ax-fsdp2-pin-version"}
    mistyped = RuleFix("safe", "", set={"fsdp_config.reshard_after_forward": "maybe"})
    assert not led_to(rule, config, mistyped, example.versions)
    of_written = written_led_to(rule, "axolotl", mistyped)
    assert of_written.keys() == {"wrong-type"}
    assert str({"axolotl": "0.13.2"}) in of_written["wrong-type"]
    assert str({"axolotl": "0.12.2"}) not in of_written["wrong-type"], "whose fsdp_config has no types"


def setting(option: str, rule: Rule, framework: str) -> dict[str, object]:
    """Return an option's setting, if it is one of the rule's and nothing else."""
    match = _SETTING.fullmatch(option)
    if match is None:
        return {}
    named = [
        key
        for key in rule.keys & KEYS.keys()
        if match[1] in (key, KEYS[key].spelling.get(framework), key.rpartition(".")[2])
    ]
    return {named[0]: yaml.safe_load(match[2])} if len(named) == 1 else {}


@pytest.mark.slow
@each_choice
def test_a_choice_leads_to_no_error_in_any_release(case: tuple[Rule, str]) -> None:
    rule, framework = case
    example = rule.examples[framework]
    config = config_of(example.bad, rule, framework)
    errors = {each.id for each in RULES if each.severity is Severity.ERROR}
    for option in rule.fix.options:
        release = _RELEASE.fullmatch(option)
        if release is not None:
            package, range_ = canonical_name(release[1]), release[2].rstrip(",")
            before = serious(judge(config, example.versions))
            for version in KNOWN.get(package, ()):
                if admits(range_, version):
                    after = serious(judge(config, {**example.versions, package: version}))
                    assert rule.id not in after, f"{option} does not end it in {version}"
                    assert not (after - before) & errors, (
                        f"{option} in {version}: {sorted((after - before) & errors)}"
                    )
        elif chosen := setting(option, rule, framework):
            found = led_to(rule, config, RuleFix("unsafe", "", set=chosen), example.versions)
            assert not found.keys() & errors, (
                f"{option}: { {each: found[each] for each in found.keys() & errors} }"
            )
