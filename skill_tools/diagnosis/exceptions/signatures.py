# SPDX-License-Identifier: Apache-2.0
"""Calls that do not fit the called function: one library was written for another release of the other.

Offloads call private functions of other libraries; their arguments change from release to release. The
exception names the function and the missing argument, and the innermost frame is who called it.
"""

import re
from itertools import pairwise

from skill_tools import knowledge
from skill_tools.diagnosis import code
from skill_tools.diagnosis.exceptions.own_words import Said
from skill_tools.diagnosis.failures import Failure, Frame

# The disagreements of a call and its function, and their words.
_LACKS = (
    (r"\(\) missing \d+ required .{0,20}arguments?: (?P<what>.{3,120})", "without {what}"),
    (
        r"\(\) takes (?P<what>.{1,40}positional arguments?) but (?P<given>\d+)",
        "with {given} arguments where it takes {what}",
    ),
    (
        r"\(\) got multiple values for argument (?P<what>'\w+')",
        "with {what} twice, by its place and by its name",
    ),
)
_CALLED = r"(?P<called>[\w.]+)"
_VALUES = re.compile(
    r"^(?:too many|not enough) values to unpack \(expected (?P<expected>[\w ]+?)(?:, got \d+)?\)"
)
_UNPACKS = re.compile(r"^[\w., ()*]+,[\w., ()*]* = (?P<called>[\w.]+)\(")
_OF_TEXT = (
    "split",
    "rsplit",
    "partition",
    "items",
    "zip",
)  # calls whose results depend on a text, not on a release
_GONE = re.compile(r"'(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'")
_SITE = re.compile(r"(?:site|dist)-packages/(?P<package>\w+)/")
_PLAIN = re.compile(r"[^a-z0-9]")
_LEAST = 4  # letters of a folder's name that its checkout's name repeats


def unfit(failure: Failure, source: str) -> Said | None:
    """Return the caller and the installed function that does not fit: in its arguments, or in its results.

    `source` is the line of source that the traceback shows last.
    """
    if not failure.frames:
        return None
    frame = failure.frames[-1]
    for pattern, words in _LACKS:
        if match := re.search(_CALLED + pattern, failure.text):
            named = {**match.groupdict(), "what": match["what"].rstrip(" .")}
            return _told(failure, match["called"], f"calls {match['called']} {words.format(**named)}")
    values, taken = _VALUES.search(failure.text.partition(": ")[2]), _UNPACKS.match(source)
    if values and taken and home(frame) and taken["called"].rpartition(".")[2] not in _OF_TEXT:
        what = (
            f"takes {values['expected']} results of {taken['called']}, which returns another number of them"
        )
        return _told(failure, taken["called"], what)
    return _renamed(failure, source)


def _told(failure: Failure, called: str, what: str) -> Said:
    owner, at = home(failure.frames[-1]), place(failure.frames[-1])
    if not owner:
        return Said(
            f"{at} {what}",
            (
                f"the arguments that the installed {called} takes: help({called})",
                f"or the release that {at} was written for",
            ),
        )
    return Said(
        f"releases that do not fit: {at} of {owner} {what}; {owner} was written for another release of the "
        f"library that {called} is from",
        (
            f"that library's release named in the requirements or the submodule of this {owner}, or a newer {owner}",
            *off(failure),
        ),
    )


def _renamed(failure: Failure, source: str) -> Said | None:
    """Return the library that calls an attribute missing in another one's class (by now)."""
    match, frame = _GONE.search(failure.text), failure.frames[-1]
    if match is None or not re.search(rf"\.{match['name']}\b", source):
        return None
    owner, library = home(frame), _library(match["kind"])
    if not owner or owner == library or not (match["name"].startswith("_") and library):
        return None
    return Said(
        f"releases that do not fit: {place(frame)} of {owner} was written for another release of {library}, with "
        f"{match['name']} in a {match['kind']}: private, and renamed or gone in the installed release",
        (
            f"an older {library}, which this {owner} was written for (pip show {owner}), or a newer {owner}",
            *off(failure),
        ),
    )


def _library(kind: str) -> str:
    """Return the distribution whose name a class begins with, such as deepspeed of DeepSpeedEngine."""
    names = (
        name
        for name in knowledge.index()["releases"]["known"]
        if kind.lower().startswith(_PLAIN.sub("", name))
    )
    return next(names, "")


def off(failure: Failure) -> tuple[str, ...]:
    """Return how the code that failed is done without, if it carries out an offload."""
    where = code.of(failure)
    return (f"or {where.code.decide[0]}",) if where is not None and where.code.mechanisms else ()


def home(frame: Frame) -> str:
    """Return the distribution or the checkout that a frame's file is of; "" for a script of the user's own.

    A checkout is a folder whose name its package repeats (slime/slime, Pai-Megatron-Patch/megatron_patch), or one with
    the name of a known distribution (SimpleTuner/helpers).
    """
    path = frame.path.replace("\\", "/")
    if match := _SITE.search(path):
        return match["package"].replace("_", "-")
    parts = path.split("/")
    for folder, package in pairwise(parts[:-1]):
        plain = _PLAIN.sub("", package.lower())
        if len(plain) >= _LEAST and plain in _PLAIN.sub("", folder.lower()):
            return folder
    known = {_PLAIN.sub("", name): name for name in knowledge.index()["releases"]["known"]}
    # A script that stands directly in such a folder is as often the user's own.
    return next((known[plain] for each in parts[:-2] if (plain := _PLAIN.sub("", each.lower())) in known), "")


def place(frame: Frame) -> str:
    """Return a frame's file and line, with the function if it has a name."""
    file = frame.path.replace("\\", "/").rpartition("/")[2]
    function = frame.function if frame.function and not frame.function.startswith("<") else ""
    return f"{function} ({file}:{frame.line})" if function else f"{file}:{frame.line}"
