# SPDX-License-Identifier: Apache-2.0
"""The linter: checks one configuration against the rules. A pure function; nothing is read or written.

A planner asks it for legality, the `lint` command for faults. The command applies suppressions
(`suppress`), because no comment may make a plan legal.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.configs.keys import Key, load_keys
from skill_tools.rules import input_checks
from skill_tools.rules.finding import Finding, LintResult, Severity, Undecided
from skill_tools.rules.knowledge import Rule, rules_about, rules_by_id
from skill_tools.rules.messages import from_rule, observed_keys, place_of, worded
from skill_tools.rules.operations import UNKNOWN
from skill_tools.rules.values import Scope
from skill_tools.rules.versions import Standing, resolve, standing, unstated_branch

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
_MOST_REMEMBERED = 100_000  # answers, some tens of megabytes
_ONE_STEP_LOWER = {Severity.ERROR: Severity.WARNING}


def lint(
    config: Config,
    *,
    rules: Sequence[Rule] | None = None,
    versions: Mapping[str, str] | None = None,
    keys: Mapping[str, Key] | None = None,
    about: frozenset[str] | None = None,
) -> LintResult:
    """Check `config` against `rules` (default: all known ones) and return the broken and the undecided ones.

    With `about`, only rules that read one of these keys are asked, and faults of form are left out. `versions` maps
    distribution names to the releases that the user states; they win over the config's own. A finding that depends on
    an unstated release is one step less severe and says so; it is only a note if today's releases are not affected. The
    same step if the fault is a key's default and an unseen recipe may set the key.
    """
    scope = Scope(config, load_keys() if keys is None else keys, resolve(config.versions, versions or {}))
    remembered = _remembered(scope) if rules is None and keys is None else _Remembered({}, set())
    dialects = config.dialects()
    conditions = (
        _conditions(dialects) if rules is None else {each.id: each for each in _about(dialects, rules)}
    )
    said = scope.said()
    if rules is None:
        about_them = dialects.union(config.shares)
        rules, by_id = rules_about(about_them), rules_by_id(about_them)
        to_ask = _found_by_key(config, said, remembered.silent)
        if about is not None:
            to_ask = ((rule, silent) for rule, silent in to_ask if not about.isdisjoint(rule.keys))
    else:
        by_id = {rule.id: rule for rule in rules}
        to_ask = _worth_asking(config, said, conditions.values())
    if config.shares:
        to_ask = chain(to_ask, _worth_asking(config, said, _shared(config, rules, scope.known_keys)))
    as_written = Scope(config, scope.known_keys, scope.versions, as_written=True)
    findings = (
        list(input_checks.check(config, rules, scope.known_keys, scope.versions)) if about is None else []
    )
    undecided = []
    for rule, says_nothing in to_ask:
        asked = (rule.id,) if says_nothing else (rule.id, *map(said.get, rule.keys))
        if asked not in remembered.answers:
            remembered.answers[asked] = _asked(rule, scope, None if says_nothing else as_written)
        found = remembered.answers[asked]
        if says_nothing and _is_silent(rule, found):
            remembered.silent.add(rule.id)
        elif isinstance(found, Undecided):
            undecided.append(found)
        elif found is not None:
            findings.append(_finding(rule, as_written if found.unless else scope, found))
    if config.shares:
        mechanisms = {rule.id: rule.mechanism for rule in rules}
        findings = list(_not_said_twice(findings, conditions.keys(), mechanisms))
    return LintResult(in_order(_without_repeats(findings, by_id)), tuple(undecided), len(rules))


class Holds(NamedTuple):
    """A rule holds: in these releases if none is stated, and unless a recipe sets one of these keys."""

    depends_on: tuple[str, ...]
    unless: tuple[str, ...]


Answer = Holds | Undecided | None


def _asked(rule: Rule, scope: Scope, as_written: Scope | None = None) -> Answer:
    """Return the answer of `rule`: None if it does not hold, the reason if it is open, its dependences if it holds.

    With `as_written`, a rule decided only by the default of one unset key holds, unless a recipe sets that key.
    """
    if rule.guard and not scope[rule.guard]:
        return None
    answer, missing = rule.condition.ask(scope)
    if answer is False:
        return None
    applies, depends_on = standing(
        rule.versions, scope.versions, conditional=rule.conditional, framework=scope.config.framework
    )
    if applies is Standing.ABSENT:
        return None
    unless: tuple[str, ...] = ()
    if answer is UNKNOWN:
        open_keys = observed_keys(missing)
        unless = scope.left_open(open_keys)
        # Two defaults that would have to be left alone together are a guess, not a finding.
        guess = as_written is None or len(unless) != 1 or rule.severity is Severity.INFO
        if guess or as_written is None or rule.condition.holds(as_written) is not True:
            return Undecided(rule.id, rule.title, open_keys)
    if depends_on and (branch := unstated_branch(rule.versions, scope.versions)):
        return Undecided(rule.id, rule.title, (branch,))
    if depends_on and rule.effect == "warns":  # a warning that some releases print is no word for the others
        return Undecided(rule.id, rule.title, tuple(rule.conditional))
    return Holds(depends_on, unless)


def _is_silent(rule: Rule, found: Answer) -> bool:
    """Return whether an answer is no word to somebody who says nothing of the rule's keys."""
    return found is None or (isinstance(found, Undecided) and not rule.keys.isdisjoint(found.missing))


def _worth_asking(
    config: Config, said: Mapping[str, object], rules: Iterable[Rule]
) -> Iterator[tuple[Rule, bool]]:
    """Yield the rules that may hold, and whether the input says nothing of their keys, as for most it does not."""
    for rule in rules:
        says_nothing = rule.keys.isdisjoint(said)
        if not (says_nothing and config.framework in rule.quiet):
            yield rule, says_nothing


def _found_by_key(
    config: Config, said: Mapping[str, object], silent: Collection[str]
) -> Iterator[tuple[Rule, bool]]:
    """Yield the answers of `_worth_asking` to all rules, without a look at impossible or `silent` ones."""
    dialects = config.dialects()
    conditions = _conditions(dialects)
    readers, always = _readers(dialects, config.framework)
    told = {name for key in said for name in readers.get(key, ())}
    return ((conditions[name], name not in told) for name in sorted(told | (always.difference(silent))))


@knowledge.derived
def _readers(dialects: frozenset[str], framework: str) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return the readers of each key, and the rules that may hold without any of their keys."""
    readers: dict[str, list[str]] = {}
    for rule in _conditions(dialects).values():
        for key in rule.keys:
            readers.setdefault(key, []).append(rule.id)
    always = (rule.id for rule in _conditions(dialects).values() if framework not in rule.quiet)
    return readers, frozenset(always)


@knowledge.derived
def _conditions(dialects: frozenset[str]) -> dict[str, Rule]:
    """Return the rules with a condition that are about any of `dialects`, by id."""
    return {rule.id: rule for rule in _about(dialects, rules_about(dialects))}


def _about(dialects: frozenset[str], rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules with a condition that are about any of `dialects`."""
    return (rule for rule in rules if rule.tree and not dialects.isdisjoint(rule.dialects))


def _shared(config: Config, rules: Sequence[Rule], keys: Mapping[str, Key]) -> Iterator[Rule]:
    """Yield the rules about code that the framework runs as another dialect does.

    Slowness is worth no word where the framework has no key for the way out.
    """
    for rule in rules:
        is_about_it = rule.tree and any(
            name in rule.dialects and rule.evidence.ref.startswith(code)
            for name, code in config.shares.items()
        )
        if is_about_it and config.framework not in rule.dialects:
            has_way_out = all(config.framework in keys[key].spelling for key in rule.fix.set)
            if has_way_out or rule.effect not in ("slow", "out-of-memory"):
                yield rule


def _without_repeats(findings: list[Finding], by_id: Mapping[str, Rule]) -> list[Finding]:
    """Return the findings without rules that yield to another found rule at least as severe."""
    if len(findings) < 2:
        return findings
    worst = {each.rule: _ORDER[each.severity] for each in findings}
    repeated = {
        name
        for name, order in worst.items()
        if any(worst.get(other, len(_ORDER)) <= order for other in by_id[name].yields_to)
    }
    return [each for each in findings if each.rule not in repeated] if repeated else findings


def _not_said_twice(
    findings: Sequence[Finding], own: Collection[str], mechanisms: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings without those of another dialect that one of the framework's `own` says as well.

    That one is about the same keys and about the same mechanism.
    """
    said = [(mechanisms[each.rule], each.observed.keys()) for each in findings if each.rule in own]
    for finding in findings:
        observed, about = finding.observed.keys(), mechanisms[finding.rule]
        is_said = any(about == mechanism and observed <= keys for mechanism, keys in said)
        if finding.rule in own or not observed or not is_said:
            yield finding


class _Remembered(NamedTuple):
    """Answers of rules in one situation, to be added to: by the rule, and the input's values of its keys.

    `silent` are the rules without an answer for inputs without their keys.
    """

    answers: dict[tuple[object, ...], Answer]
    silent: set[str]


def _remembered(scope: Scope) -> _Remembered:
    config = scope.config
    shares = frozenset(config.shares.items())
    versions = frozenset(scope.versions.items())
    kept = _kept(config.framework, config.embeds, config.dialects(), config.complete, versions, shares)
    if len(kept.answers) > _MOST_REMEMBERED:
        kept.answers.clear()
    return kept


@knowledge.derived
def _kept(*situation: object) -> _Remembered:
    return _Remembered({}, set())


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return `findings` worst first, then by place and rule, each only once."""
    first = {(finding.rule, finding.place, finding.message): finding for finding in reversed(findings)}
    return tuple(
        sorted(
            first.values(),
            key=lambda finding: (
                _ORDER[finding.severity],
                finding.place.file,
                finding.place.line,
                finding.place.column,
                finding.rule,
                finding.message,
            ),
        )
    )


def _finding(rule: Rule, scope: Scope, holds: Holds) -> Finding:
    depends_on, unless = holds
    keys = observed_keys(rule.condition.deciding_names(scope))
    changed = [key for key in keys if key in rule.fix.set or key in rule.fix.remove]
    place = place_of((*changed, *keys), scope.config)
    message, beside = worded(rule.message, keys, scope, place)
    finding = from_rule(rule, message=message, place=place)
    observed = {key: scope.versions.get(key, scope[key]) for key in keys}
    is_lower = depends_on or (unless and _is_doubted(rule, scope, unless))
    severity = _ONE_STEP_LOWER.get(rule.severity, Severity.INFO) if is_lower else rule.severity
    if depends_on and not rule.holds_today:
        severity = Severity.INFO
    return finding._replace(
        beside=beside, observed=observed, severity=severity, depends_on=depends_on, unless=unless
    )


def _is_doubted(rule: Rule, scope: Scope, unless: tuple[str, ...]) -> bool:
    """Whether a possible source of the `unless` keys makes the finding less severe: an environment leaves a warning."""
    only_outside = all(scope.config.framework in scope.known_keys[key].outside for key in unless)
    return rule.severity is Severity.ERROR or not only_outside
