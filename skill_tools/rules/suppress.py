# SPDX-License-Identifier: Apache-2.0
"""Suppressions: `# offload: ignore[la-pp, oc-lora] why this is fine here`, on the line of a finding or above it.

A suppression needs a reason, because the next reader has to judge it. Suppressions without a reason, without a known
rule or without effect are findings themselves (rules `suppression-*`). Only suppressions with a reason suppress.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from skill_tools.configs.config import Config, Place
from skill_tools.rules.finding import Finding, LintResult
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.rules.lint import in_order
from skill_tools.rules.messages import from_rule

_MARK = "offload:"  # a text without it suppresses nothing


class Suppression(NamedTuple):
    """One comment: its rules, its reason, its place and its lines."""

    rules: tuple[str, ...]
    reason: str
    place: Place
    lines: tuple[int, ...]


def apply(result: LintResult, config: Config, load: Callable[[], Sequence[Rule]] = load_rules) -> LintResult:
    """Return `result` without the suppressed findings, and with findings about bad suppressions.

    `load` returns all rules; it is called only where a suppression is bad, as all rules take a tenth of a lint.
    """
    suppressions = [found for file, text in config.sources.items() for found in read(file, text)]
    if not suppressions:
        return result
    used: set[tuple[Suppression, str]] = set()
    kept: list[Finding] = []
    for finding in result.findings:
        covering = [suppression for suppression in suppressions if _covers(suppression, finding)]
        used |= {(suppression, finding.rule) for suppression in covering}
        kept += [] if covering else [finding]
    bad = [
        each for each in suppressions if not (each.rules and all((each, name) in used for name in each.rules))
    ]
    by_id = {rule.id: rule for rule in load()} if bad else {}
    for suppression in bad:
        kept += _complaints(suppression, used, by_id)
    return result._replace(findings=in_order(kept))


def read(file: str, text: str) -> Iterator[Suppression]:
    """Yield the suppressions in `text`; a comment on a line of its own speaks for the next line too."""
    if _MARK not in text or "ignore" not in text:
        return
    comment = re.compile(r"#\s*offload:\s*ignore(?:\[([^\]\n]*)\])?[ \t]*([^\n]*)")
    for number, line in enumerate(text.split("\n"), start=1):
        match = comment.search(line)
        if match:
            alone = not line[: match.start()].strip()
            names = tuple(name.strip() for name in (match[1] or "").split(",") if name.strip())
            lines = (number, number + 1) if alone else (number,)
            yield Suppression(names, match[2].strip(), Place(file, number, match.start() + 1), lines)


def _covers(suppression: Suppression, finding: Finding) -> bool:
    return (
        bool(suppression.reason)
        and finding.rule in suppression.rules
        and finding.place.file == suppression.place.file
        and finding.place.line in suppression.lines
    )


def _complaints(
    suppression: Suppression, used: set[tuple[Suppression, str]], by_id: Mapping[str, Rule]
) -> Iterator[Finding]:
    if not suppression.reason or not suppression.rules:
        yield _complaint(
            by_id, "suppression-without-reason", ", ".join(suppression.rules) or "no rule", suppression
        )
        return
    for name in suppression.rules:
        if name not in by_id:
            yield _complaint(by_id, "suppression-unknown-rule", name, suppression)
        elif (suppression, name) not in used:
            yield _complaint(by_id, "suppression-unused", name, suppression)


def _complaint(by_id: Mapping[str, Rule], rule: str, about: str, suppression: Suppression) -> Finding:
    return from_rule(by_id[rule], message=f"{by_id[rule].message}: {about}", place=suppression.place)
