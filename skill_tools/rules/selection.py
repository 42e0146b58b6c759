# SPDX-License-Identifier: Apache-2.0
"""Which rules count: chosen and left out by id or by family, for all files or for some.

A selector is a rule's id (`la-pp`), the beginning of ids up to a dash (`la`, `ds-zenflow`), or `ALL`. Where a rule is
both chosen and left out, the longer selector decides. Precedence is ruff's: selections of the command line take the
place of a file's; rules that it ignores are ignored besides.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import PurePath
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.errors import UnusableInput
from skill_tools.nearest import did_you_mean
from skill_tools.rules.finding import LintResult
from skill_tools.rules.knowledge import Rule

EVERY = "ALL"


class Selection(NamedTuple):
    """Selectors of one place, the command line or a file; `select` is None where it says nothing of it.

    `per_file` maps a pattern of file names to selectors that are ignored there; the patterns are relative to `folder`.
    """

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    per_file: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    folder: str = ""

    def below(self, command_line: "Selection") -> "Selection":
        """Return the selection of this one, from a file, together with `command_line`."""
        if command_line.is_everything:
            return self
        if command_line.select is not None:
            return command_line._replace(per_file=self.per_file, folder=self.folder)
        return self._replace(ignore=(*self.ignore, *command_line.ignore))

    @property
    def is_everything(self) -> bool:
        """Whether every rule counts in every file."""
        return self.select is None and not self.ignore and not self.per_file

    def counts(self, rule: str, file: str) -> bool:
        """Return whether the rule with this id counts in `file`, a path as from the working folder."""
        chosen = _closest(rule, (EVERY,) if self.select is None else self.select)
        if not chosen or chosen <= _closest(rule, self.ignore):
            return False
        return not any(_closest(rule, ignored) for ignored in self._ignored_in(file))

    def _ignored_in(self, file: str) -> Iterable[tuple[str, ...]]:
        if not self.per_file:
            return
        path = PurePath(os.path.abspath(file))
        names = {path.name, path.as_posix(), PurePath(os.path.relpath(path, self.folder or ".")).as_posix()}
        for pattern, selectors in self.per_file.items():
            is_negated, plain = pattern.startswith("!"), pattern.removeprefix("!")
            if any(fnmatch(name, plain) for name in names) is not is_negated:
                yield selectors


def _closest(rule: str, selectors: Iterable[str]) -> int:
    """Return how close the closest of the `selectors` comes to `rule`; 0 if none is about it."""
    return max((_closeness(rule, each) for each in selectors), default=0)


def _closeness(rule: str, selector: str) -> int:
    if selector == EVERY:
        return 1
    return 1 + len(selector) if rule == selector or rule.startswith(f"{selector}-") else 0


def checked(selectors: Sequence[str], known: Iterable[str], where: str) -> tuple[str, ...]:
    """Return `selectors`; raises `UnusableInput` for one without a rule in `known`, at `where`."""
    ids = set(known)
    families = {rule[: dash.start()] for rule in ids for dash in re.finditer("-", rule)}
    for each in selectors:
        if each != EVERY and each not in ids and each not in families:
            raise UnusableInput(
                f"{where}: there is no rule {each!r}",
                expected="the id of a rule, a beginning of ids such as la or ds-zenflow, or ALL",
                attempt=did_you_mean(each, ids | families, otherwise="explain --list"),
            )
    return tuple(selectors)


def kept(result: LintResult, selection: Selection, file: str, rules: Iterable[Rule]) -> LintResult:
    """Return `result` without findings that do not count: of findings their own file decides, of open ones `file`.

    `rules` are the asked ones.
    """
    findings = tuple(each for each in result.findings if selection.counts(each.rule, each.place.file))
    undecided = tuple(each for each in result.undecided if selection.counts(each.rule, file))
    asked = sum(selection.counts(rule.id, file) for rule in rules)
    return result._replace(findings=findings, undecided=undecided, rules=asked)
