# SPDX-License-Identifier: Apache-2.0
"""Asks the linter's rules whether a candidate is legal: the same facts that judge a configuration judge a plan.

The candidate's settings are laid over the user's configuration and the result is linted. An error about one of the
candidate's own keys excludes it, with the rule's id as the reason. A rule that needs an unset key becomes a condition.
"""

from collections.abc import Mapping
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.keys import load_keys
from skill_tools.dialects.candidates import MECHANISMS, Candidate
from skill_tools.rules.finding import Finding, Severity
from skill_tools.rules.input_checks import dead_keys
from skill_tools.rules.knowledge import rules_about
from skill_tools.rules.lint import lint
from skill_tools.rules.versions import Standing, resolve, standing

_PLAN = Place("<plan>", 1, 1)
_OFF = (None, False, 0, "none")


class RuledOut(NamedTuple):
    """Why a candidate cannot run: the rule and its message in one line."""

    rule: str
    reason: str


class Condition(NamedTuple):
    """An open rule: it would rule the candidate out, depending on unset keys."""

    rule: str
    title: str
    missing: tuple[str, ...]


class Legality(NamedTuple):
    """The rules' answer: rules that exclude a candidate, rules to watch, and the deciding unset keys."""

    ruled_out: tuple[RuledOut, ...]
    watch: tuple[RuledOut, ...]
    conditions: tuple[Condition, ...]

    @property
    def legal(self) -> bool:
        """Whether no rule forbids it."""
        return not self.ruled_out


LEGAL = Legality((), (), ())


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Return `config` with `settings` laid over it."""
    laid = dict(config.settings)
    for key, value in settings.items():
        old = config.settings.get(key)
        laid[key] = Setting(key, value, old.written if old else key, old.place if old else _PLAN)
    known = set(settings)
    return config._replace(
        settings=laid, unresolved=config.unresolved - known, maybe_set=config.maybe_set - known
    )


class Judge:
    """Answers for candidates of one configuration; candidates that differ only in amounts share an answer."""

    def __init__(self, config: Config, versions: Mapping[str, str]) -> None:
        self._config = config
        self._versions = versions
        self._releases = resolve(config.versions, versions)
        self._answers: dict[tuple[object, ...], Legality] = {}

    def of(self, candidate: Candidate) -> Legality:
        """Return whether `candidate` is legal."""
        known = self._answers.get(candidate.structure)
        if known is None:
            known = self._answers[candidate.structure] = self._ask(candidate)
        return known

    def as_it_is(self, candidate: Candidate) -> Legality:
        """Return the answer for `candidate`, the run as it stands: every error that the linter has counts."""
        own = self.of(candidate)
        findings = lint(self._config, versions=self._versions).findings
        errors = [_line(finding) for finding in findings if finding.severity is Severity.ERROR]
        return own._replace(ruled_out=tuple(dict.fromkeys((*own.ruled_out, *errors))))

    def left_by(self, settings: Mapping[str, object]) -> tuple[RuledOut, ...]:
        """Return the errors that the configuration has with `settings` laid over it, each with its remedy.

        The keys that no release has are gone by then, and so is an embedded section that another file replaces.
        """
        dead = set(self.dead_keys())
        laid = with_settings(self._config, settings)
        kept = {
            key: each
            for key, each in laid.settings.items()
            if key in settings or not (each.written in dead or laid.owner(key) in settings)
        }
        laid = laid._replace(
            settings=kept, unknown=tuple(each for each in laid.unknown if each.written not in dead)
        )
        findings = lint(laid, versions=self._versions).findings
        errors = {each.rule: each for each in findings if each.severity is Severity.ERROR}
        return tuple(RuledOut(rule, f"{each.title}. {each.next}") for rule, each in errors.items())

    def lacks(self, key: str) -> bool:
        """Return whether the run's releases are known, and do not have the canonical `key`."""
        known = load_keys().get(key)
        return known is not None and standing(known.exists, self._releases)[0] is Standing.ABSENT

    def dead_keys(self) -> tuple[str, ...]:
        """Return the set keys of offload, as written, that the run's release lacks."""
        keys = load_keys()
        lacking = (
            setting.written
            for key, setting in self._config.settings.items()
            if key in keys and keys[key].mechanism in MECHANISMS and self.lacks(key)
        )
        return (*dead_keys(self._config), *lacking)

    def _ask(self, candidate: Candidate) -> Legality:
        own = frozenset[str]().union(*map(_carrying_out, candidate.mechanisms))
        if not own:
            return LEGAL
        own |= _switched_on(candidate.settings)
        laid = with_settings(self._config, candidate.settings)
        linted = lint(laid, about=own, versions=self._versions)
        serious = _serious(laid.dialects().union(laid.shares))
        about = [finding for finding in linted.findings if own & set(finding.observed)]
        return Legality(
            tuple(_line(finding) for finding in about if finding.severity is Severity.ERROR),
            # An error of releases that nobody states is one to watch too.
            tuple(
                _line(finding)
                for finding in about
                if finding.severity is Severity.WARNING
                or (finding.severity is Severity.INFO and finding.depends_on and finding.rule in serious)
            ),
            tuple(
                Condition(each.rule, each.title, each.missing)
                for each in linted.undecided
                if each.rule in serious
            ),
        )


@knowledge.derived
def _carrying_out(mechanism: str) -> frozenset[str]:
    """Return the keys that carry out a plan's `mechanism`."""
    return frozenset(key.name for key in load_keys().values() if key.planned == mechanism)


def _switched_on(settings: Mapping[str, object]) -> frozenset[str]:
    """Return the keys of `settings` that switch on some offload: that of parameters brings the optimizer's."""
    keys = load_keys()
    return frozenset(
        key for key, value in settings.items() if key in keys and keys[key].planned and value not in _OFF
    )


@knowledge.derived
def _serious(dialects: frozenset[str]) -> frozenset[str]:
    """Return the rules about `dialects` that exclude a candidate if they hold."""
    return frozenset(rule.id for rule in rules_about(dialects) if rule.severity is Severity.ERROR)


def _line(finding: Finding) -> RuledOut:
    release = f" (depends on {', '.join(finding.depends_on)})" if finding.depends_on else ""
    return RuledOut(finding.rule, f"{finding.title}{release}")
