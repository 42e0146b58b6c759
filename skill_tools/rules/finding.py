# SPDX-License-Identifier: Apache-2.0
"""The linter's results: findings, and the rules that could not be decided.

Plain frozen data with no behaviour but its order. `schema/findings.schema.json` describes its JSON form;
`reports/findings.py` renders it.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.configs.config import Place

# The meaning of each effect of a rule for the user; the schema of the rules lists the effects.
CONSEQUENCES: Mapping[str, str] = MappingProxyType(
    {
        "raises": "refused at startup",
        "raises-at-build": "refused when the model or the optimizer is built",
        "crashes-later": "crashes later",
        "wrong-numerics": "wrong numbers",
        "ignored": "ignored",
        "slow": "slow",
        "out-of-memory": "out of memory",
        "warns": "only a warning",
        "fact": "good to know",
    }
)


class Severity(StrEnum):
    """How much a finding matters, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Fix(NamedTuple):
    """A way out. `manual` lists ranked options and is never applied; `unsafe` needs `--unsafe-fixes`."""

    applicability: str
    description: str
    options: tuple[str, ...] = ()
    diff: str = ""


class Evidence(NamedTuple):
    """Why we believe a rule: tag (`msg`, `src`, `sim`, `iss`, `derived`), symbol or thread, and a quote."""

    tag: str
    ref: str
    quote: str


class EvidenceIn(NamedTuple):
    """The evidence of the same belief in releases whose code has other words: their range, symbol and quote."""

    versions: Mapping[str, str]
    ref: str
    quote: str


class Next(NamedTuple):
    """A finding that there will be once the remedy of another is in: its rule, its words and its own remedy."""

    rule: str
    severity: Severity
    message: str
    remedy: str


class Finding(NamedTuple):
    """One rule that the configuration breaks.

    `beside` is the message without the setting at `place`, for a display with that line; empty if it is the same.
    `effect` is the rule's, a key of `CONSEQUENCES`, and `text` the framework's own message, with `…` for its variable
    parts; empty where it prints nothing. `after` are the findings that its remedy leads to. `observed` maps each key
    that the condition read to the value it had (set or default). `depends_on` names the releases that would make it
    hold when the version is not known, for example `megatron-core>=0.18`. `unless` names unset keys with deciding
    defaults: an unseen recipe may set them.
    """

    rule: str
    severity: Severity
    title: str
    message: str
    place: Place
    observed: Mapping[str, object]
    why: str
    evidence: Evidence
    next: str
    fix: Fix
    docs: str
    depends_on: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    effect: str = "fact"
    text: tuple[str, ...] = ()
    after: tuple[Next, ...] = ()
    beside: str = ""

    def depending_on(self, releases: tuple[str, ...]) -> "Finding":
        """Return the finding one step less severe if it depends on `releases` that nobody stated, else as it is."""
        if not releases:
            return self
        lower = Severity.WARNING if self.severity is Severity.ERROR else Severity.INFO
        return self._replace(severity=lower, depends_on=releases)


class Undecided(NamedTuple):
    """A rule that stays open because nobody set the `missing` keys and their default is not known."""

    rule: str
    title: str
    missing: tuple[str, ...]


class LintResult(NamedTuple):
    """The result of one lint: findings in a stable order, undecided rules, and how many rules were asked."""

    findings: tuple[Finding, ...]
    undecided: tuple[Undecided, ...]
    rules: int = 0
