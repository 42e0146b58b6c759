# SPDX-License-Identifier: Apache-2.0
"""An exception in its own words: a library refuses a combination.

No fact about a framework is needed: a refusal names the argument that it does not take, and its place in the run.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.symptoms import load_offloads, sign_in

_REFUSES = (
    "ValueError",
    "AssertionError",
    "NotImplementedError",
    "RuntimeError",
    "TypeError",
    "ValidationError",
    "ZeRORuntimeException",
    "MisconfigurationException",
    "Exception",
)
_OFFLOADS = re.compile(
    r"(?i)off-?load|\bswap|nvme|pin[_ ]memory|zero[ -]?(?:stage ?)?[123]|sleep[_ ]mode|cpu_adam|on (?:the )?cpu"
)
_DIRECTS = (
    r"please (?:either )?(?!file|report|open|see|refer|check|let|contact)[a-z]+ |can also (?:set|use) |set .{1,40} to "
    r"|use .{1,40} instead|is required|requires? |make sure (?:to|that) |supported only |only supported "
    r"|only supports? |you should "
)
_FORBIDS = re.compile(
    r"(?i)not (?:yet |currently )?(?:supported|compatible|implemented|allowed|work)|unsupported|incompatible"
    r"|(?:can ?not|can't|must(?: not)?|should not) (?:be|use) |do(?:es)?(?: not|n't) support"
    r"|only (?:supports?|supported|available|works|be used)|(?:supported|available|implemented) only"
    rf"|mutually exclusive|{_DIRECTS}"
)
_DIRECTIVE = re.compile(rf"(?i)[^.;]*(?:{_DIRECTS})[^;]*?(?=\.\s|\.$|;|$)")
# An option, as texts name them: with an underscore or two hyphens, or in quotes.
_OPTION = re.compile(r"--[a-z][\w-]{3,60}|\b[a-z]+(?:_[a-z0-9]+){1,8}\b|[`'\"]([A-Za-z][\w.-]{3,60})[`'\"]")
# Two things that a text holds apart, each in the forms of such a sentence.
_BEGINS, _ENDS = r"(?i)(?:^|: |[.;] |\byou )", r"(?=\. |[;,]|\.?$)"
_NOT = r"(?:is|are) (?:currently )?(?:not (?:yet |currently )?(?:compatible|supported)|incompatible)"
_APART = tuple(
    re.compile(f"{_BEGINS}{form}{_ENDS}")
    for form in (
        r"can(?: ?not|'t) use (?P<one>.{2,80}?) (?:with|and|together with|alongside|in|under) (?P<other>.{2,80}?)",
        rf"(?!this |it )(?P<one>[^.;:]{{2,80}}?) {_NOT} (?:with|for|in|under|by|when using) (?P<other>.{{2,80}}?)",
        r"(?P<one>[^.;:]{2,80}?) (?:does(?: not|n't)|don't|do not) (?:yet |currently )?support (?P<other>.{2,80}?)",
    )
)
# What works with one value alone.
_NEEDS = re.compile(rf"{_BEGINS}(?P<one>.{{2,80}}?) only works? with (?P<value>\w+ ?=+ ?[\w.]+?){_ENDS}")
# A value that it does not take beside the other thing.
_BOUND = re.compile(
    r"(?P<one>[^.;:]{2,60}?) (?:can ?not|can't|must not|should not) be [\w ]{2,40}? (?:if|when|with) "
    r"[\"'`]?(?P<name>[a-z]\w{3,40})[\"'`]? ?(?P<is>>=?|<=?|==|!=) ?(?P<value>[\w.]+)"
)
_WITHIN = {
    ">": "at most {}",
    "<": "at least {}",
    "!=": "{}",
    ">=": "below {}",
    "<=": "above {}",
    "==": "not {}",
}
_MOST_OPTIONS, _MOST_ASKED = 3, 2
_LONGEST = 400


class Said(NamedTuple):
    """The cause in words, and the change."""

    cause: str
    change: tuple[str, ...]


def refusal(failure: Failure, said: str, texts: Iterable[tuple[str, str]]) -> Said | None:
    """Return the combination refused by `failure`; `texts` are run files.

    Its words (`said`) name an offload, or a setting of the run's files.
    """
    whole = " ".join(said.split("\n\n")[0].split())
    words = whole[:_LONGEST]
    if failure.error.rpartition(".")[2] not in _REFUSES or not _FORBIDS.search(words):
        return None
    read = tuple(texts)
    set_here = _set_here(words, read)
    if not (_OFFLOADS.search(words) or set_here or _names_an_owner(words)):
        return None
    named = dict.fromkeys(match[1] or match[0] for match in _OPTION.finditer(words.partition(": ")[2]))
    there = [*filter(None, [set_here]), *(sign for name in named if (sign := sign_in([name], read)))]
    there = there[:_MOST_OPTIONS]
    where = f", raised in {_place(failure)}" if failure.frames else ""
    cause = f"a library refuses this combination{where}, in its own words: {words}"
    asked = [f"as it says: {match[0].strip()}" for match in _DIRECTIVE.finditer(whole.partition(": ")[2])]
    change = (*(asked[:_MOST_ASKED] or [_one_of_two(whole)]),)
    if there:
        return Said(f"{cause}; this run has {', '.join(there)}", (*change, f"or without {there[0]}"))
    return Said(cause, change)


def _names_an_owner(words: str) -> bool:
    """Return whether `words` name a library with an offload of its own, or one that shards the offloaded tensors."""
    owners = (offload.name.partition("'s ") for offload in load_offloads().values())
    return any(owned and owner.lower() in words.lower() for owner, owned, _ in owners)


def _set_here(words: str, read: Sequence[tuple[str, str]]) -> str:
    """Return the setting of the run's files that one of two refused things is called after; "" without one."""
    for form in _APART:
        if match := form.search(words.partition(": ")[2]):
            for side in (match["other"], match["one"]):
                name = "_".join(re.findall(r"[a-z0-9]+", side.lower()))
                if name.count("_") and (sign := sign_in([name, f"--{name.replace('_', '-')}"], read)):
                    return sign
    return ""


def _one_of_two(words: str) -> str:
    """Return the change for a refusal of two things together."""
    if match := _NEEDS.search(words.partition(": ")[2]):
        return f"{match['value'].strip()}, or no {match['one'].strip()}"
    if match := _BOUND.search(words.partition(": ")[2]):
        within = _WITHIN[match["is"]].format(match["value"])
        return f"{match['name']} {within}, or no {match['one'].strip()}"
    match = next((found for form in _APART if (found := form.search(words.partition(": ")[2]))), None)
    if match is None:
        return "one of the two without the other"
    return f"one without the other: no {match['one'].strip()}, or no {match['other'].strip().removesuffix(' yet')}"


def _place(failure: Failure) -> str:
    frame = failure.frames[-1]
    path: str = frame.path.replace("\\", "/")
    return f"{'/'.join(path.split('/')[-3:])}:{frame.line}"
