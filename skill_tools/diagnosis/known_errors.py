"""Framework errors in a log that rules know: each rule's `raises` is matched with the text.

A `raises` may have holes (`{..}`). Several rules can share one text; then the rules that the configuration breaks
are kept, or without one, those whose own keys stand on the matched line.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis.log import Log
from skill_tools.rules.knowledge import Rule, load_rules

_HOLE = "{..}"
_REACH = 1200  # characters after the first piece in which the rest of a message has to follow
_SHARED = 3  # rules shown when nothing tells those with the same text apart


@dataclass(frozen=True, slots=True)
class KnownError:
    """One framework message in the log, and the rules that explain it; `confirmed` ones break the configuration."""

    line: int
    text: str
    rules: tuple[Rule, ...]
    confirmed: tuple[str, ...]


def find(log: Log, *, broken: Iterable[str] = ()) -> tuple[KnownError, ...]:
    """Return the known messages in `log`, in its order; `broken` are ids that lint found in the configuration."""
    confirmed_ids = set(broken)
    at: dict[int, list[Rule]] = {}
    for rule in load_rules():
        for template in rule.raises:
            position = _position(log.text, template)
            if position >= 0 and rule not in at.setdefault(position, []):
                at[position].append(rule)
    errors = []
    for position in sorted(at):
        line = log.context(position)
        confirmed = tuple(rule.id for rule in at[position] if rule.id in confirmed_ids)
        rules = tuple(rule for rule in at[position] if rule.id in confirmed) or _nearest(at[position], line)
        errors.append(KnownError(log.line_at(position), line, rules, confirmed))
    return tuple(errors)


def _position(text: str, template: str) -> int:
    """Return where `template` first stands in `text`, or -1."""
    pieces = [piece.strip() for piece in template.split(_HOLE) if piece.strip()]
    start = text.find(pieces[0]) if pieces else -1
    while start >= 0:
        end = start
        for piece in pieces:
            end = text.find(piece, end, start + _REACH + len(template))
            if end < 0:
                break
            end += len(piece)
        else:
            return start
        start = text.find(pieces[0], start + 1)
    return -1


def _nearest(rules: Sequence[Rule], line: str) -> tuple[Rule, ...]:
    """Return the rules that the line speaks of most; of those, what holds in more frameworks comes first."""
    scored = [(_mentions(rule, line), rule) for rule in rules]
    best = max(score for score, _ in scored)
    chosen = sorted((rule for score, rule in scored if score == best), key=lambda rule: -len(rule.dialects))
    return tuple(chosen[:_SHARED])


def _mentions(rule: Rule, line: str) -> int:
    """Count how many of the rule's own keys the line names, in any spelling."""
    keys = load_keys()
    own = set(rule.condition.names) if rule.when else set()
    spellings = {spelling for key in own & keys.keys() for spelling in keys[key].spelling.values()}
    return sum(1 for word in (*spellings, *rule.spellings, *own) if len(word) > 3 and word in line)
