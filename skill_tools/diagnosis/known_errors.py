# SPDX-License-Identifier: Apache-2.0
"""Framework errors in a log that rules know: each rule's `raises` is matched with the text.

Several rules can share one text. Then the rules broken by the configuration are kept. Without a configuration, those of
the run's own framework (by its configuration or a traceback) are kept, and of these the ones with keys on the line.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis import code
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.texts import position, span
from skill_tools.dialects import registry
from skill_tools.rules.knowledge import Rule, load_rules

_BARE = re.compile(r"[\w.]+(?:: ?'?\{\.\.\}'?)?$|'\w+'$")
# The texts of Python and argparse about any name; which one stands in a hole.
_ANY_NAME = re.compile(
    r"(?:got an unexpected keyword argument '{0,2}|unrecognized arguments: ?)(?:\{\.\.\})?'{0,3}$"
)
_LONGEST_PATH = 400  # characters
_SHARED = 3  # rules shown when nothing tells those with the same text apart


@dataclass(frozen=True, slots=True)
class KnownError:
    """One framework message in the log, and the rules that explain it; `confirmed` ones break the configuration.

    `of_the_run`: the rules are about the framework of this run. `ended_the_run`: the message is part of the ending
    exception.
    """

    line: int
    text: str
    rules: tuple[Rule, ...]
    confirmed: tuple[str, ...]
    of_the_run: bool = False
    ended_the_run: bool = False

    def is_about(self, dialects: Iterable[str]) -> bool:
        """Return whether a rule is about the framework of this run, or about one of `dialects`, which it embeds."""
        return self.of_the_run or any(not set(rule.dialects).isdisjoint(dialects) for rule in self.rules)

    def is_told_otherwise(
        self, failure: Failure | None, dialects: Sequence[str], lines: Collection[int]
    ) -> bool:
        """Return whether a message tells its line (of `lines`), and nothing of the run is the rules' framework.

        A library's text reaches many frameworks; the rule knows why one of them gets it.
        """
        shows_who = bool(dialects or (failure and failure.frames))
        return shows_who and self.line in lines and not self.is_about(dialects)

    def is_of_another(self, failure: Failure | None, dialects: Sequence[str]) -> bool:
        """Return whether the frames of `failure` go through no code of the rules' framework, nor of their mechanism.

        The same text (`CUDA error: invalid argument`) is another's there.
        """
        if not (failure and failure.frames and self.ended_the_run and dialects) or self.is_about(dialects):
            return False
        where = code.of(failure)
        return where is None or all(rule.mechanism not in where.code.mechanisms for rule in self.rules)


def find(
    log: Log, *, broken: Iterable[str] = (), framework: str = "", ended_by: Failure | None = None
) -> tuple[KnownError, ...]:
    """Return the known messages in `log`, in its order.

    `broken` are ids that lint found in the configuration, `framework` is the dialect of the configuration. An
    exception's name alone says too little: it counts if the configuration breaks its rule.
    """
    confirmed_ids = set(broken)
    at: dict[int, list[Rule]] = {}  # by the place where the first of a line's texts begins
    first_of: dict[int, int] = {}
    for rule in load_rules():
        for template in rule.raises:
            if _BARE.match(template) and rule.id not in confirmed_ids:
                continue
            place = _place(log, template, ended_by)
            if place < 0 or (
                _ANY_NAME.search(template) and not _is_about(rule, log, place, framework, confirmed_ids)
            ):
                continue
            place = first_of.setdefault(log.text.rfind("\n", 0, place), place)
            if rule not in at.setdefault(place, []):
                at[place].append(rule)
    run = (framework, *frameworks(log)) if at else ()
    errors = []
    for place in sorted(at):
        line = log.context(place)
        confirmed = tuple(rule.id for rule in at[place] if rule.id in confirmed_ids)
        own = _of_the_run(at[place], run)
        rules = tuple(rule for rule in at[place] if rule.id in confirmed) or _nearest(own or at[place], line)
        inside = ended_by is not None and ended_by.meets(place, place + 1)
        errors.append(KnownError(log.line_at(place), line, rules, confirmed, bool(own), inside))
    return tuple(errors)


def _is_about(rule: Rule, log: Log, place: int, framework: str, confirmed: set[str]) -> bool:
    """Return whether a text at `place` about any name is about `rule`: its keys, or its framework's run."""
    if rule.id in confirmed or _mentions(rule, log.context(place)):
        return True
    return not {framework, *frameworks(log)}.isdisjoint(rule.dialects)


def _place(log: Log, template: str, ended_by: Failure | None) -> int:
    """Return the place of `template`: in the exception that ended the run, or else its first; -1 where nowhere."""
    if ended_by is not None:
        start, end = span(log.text, template, ended_by.start)
        if start >= 0 and ended_by.meets(start, end):
            return start
    return position(log.text, template)


def frameworks(log: Log) -> tuple[str, ...]:
    """Return the frameworks with code in a traceback of `log`; one that runs in another comes before it."""
    return _frameworks(log.text)


@lru_cache(maxsize=2)
def _frameworks(text: str) -> tuple[str, ...]:
    """Return the frameworks of a log's text; several ask, of a text that may be long."""
    return tuple(dialect.name for dialect in registry.with_files() if _goes_through(text, dialect.package))


def _goes_through(text: str, package: str) -> bool:
    """Return whether `package/` stands in `text` as a folder's whole name; `re` would take a hundred times as long.

    A folder of that name inside of an installed package is another's: torch has an `nn/modules`.
    """
    start = text.find(f"{package}/")
    while start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_.-" or _is_inside(text, start)):
        start = text.find(f"{package}/", start + 1)
    return start >= 0 and text[start + len(package) + 1 : start + len(package) + 2].isidentifier()


def _is_inside(text: str, start: int) -> bool:
    """Return whether the folder whose path goes on at `start` belongs to another package than itself."""
    path = text[max(text.rfind("\n", 0, start), text.rfind('"', 0, start), start - _LONGEST_PATH) + 1 : start]
    return path.endswith("/nn/") or ("-packages/" in path and not path.endswith("-packages/"))


def _of_the_run(rules: Sequence[Rule], frameworks: Sequence[str]) -> list[Rule]:
    """Return the rules about the first of `frameworks` that any of them is about."""
    return next(
        (own for name in frameworks if (own := [rule for rule in rules if name in rule.dialects])), []
    )


def _nearest(rules: Sequence[Rule], line: str) -> tuple[Rule, ...]:
    """Return the rules closest to the line; of equal ones, for more frameworks, then with more of its text first."""
    scored = [(_mentions(rule, line), rule) for rule in rules]
    best = max(score for score, _ in scored)
    equal = (rule for score, rule in scored if score == best)
    chosen = sorted(equal, key=lambda rule: (-len(rule.dialects), -_said_by(rule, line)))
    return tuple(chosen[:_SHARED])


def _said_by(rule: Rule, line: str) -> int:
    """Return how many characters of the line are the rule's own text."""
    return max((len(text) for text in rule.raises if position(line, text) >= 0), default=0)


def _mentions(rule: Rule, line: str) -> int:
    """Count how many of the rule's own keys the line names, in any spelling."""
    keys = load_keys()
    own = set(rule.condition.names) if rule.tree else set()
    spellings = {spelling for key in own & keys.keys() for spelling in keys[key].spelling.values()}
    return sum(1 for word in (*spellings, *rule.spellings, *own) if len(word) > 3 and word in line)
