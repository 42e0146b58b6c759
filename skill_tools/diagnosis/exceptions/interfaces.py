# SPDX-License-Identifier: Apache-2.0
"""Calls that do not fit: a name or an argument missing or unexpected in the called code.

An offload wraps and replaces other libraries' functions, so a release of either, or a script of the user, may call it
with unknown arguments. No fact about a framework is needed: a traceback's exception, frames and line of source show the
caller, the called function and the arguments.
"""

import re
from collections.abc import Sequence

from skill_tools import knowledge
from skill_tools.diagnosis import code
from skill_tools.diagnosis.exceptions import signatures
from skill_tools.diagnosis.exceptions.own_words import Said
from skill_tools.diagnosis.exceptions.signatures import off, place
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.symptoms import sign_in

_MISSING_NAME = re.compile(r"cannot import name ['\"](?P<name>\w+)['\"] from ['\"](?P<module>[\w.]+)['\"]")
_MISSING_PART = re.compile(r"module ['\"](?P<module>[\w.]+)['\"] has no attribute ['\"](?P<name>\w+)['\"]")
_NO_MODULE = re.compile(r"No module named '(?P<package>\w+)\.[\w.]+'")
_UNEXPECTED = re.compile(r"(?P<called>[\w.]+)\(\) got an unexpected keyword argument ['\"](?P<name>\w+)['\"]")
_SITE = re.compile(r"(?:site|dist)-packages/(?P<package>\w+)/")
_BELOW_TRAINERS = ("torch", "ray", "numpy")  # packages with the innermost frames of any trainer
_COMMUNICATES = "vllm/distributed/"  # an engine's code for the trainers' weights
_NOT_OF_IT = re.compile(r"'(?P<kind>\w*Offload\w*)' object has no attribute '(?P<name>\w+)'")
_NO_SETTING = re.compile(r"'(?P<kind>\w+(?:Config|Arguments))' object has no attribute '(?P<name>\w+)'")
_AMBIGUOUS = "Boolean value of Tensor with more than one value is ambiguous"
_TESTED = re.compile(r"^(?:if|elif|while|assert) (?:not )?(?P<name>[a-z_]\w*)\b(?! *[.(\[])")
_ASSERTED = re.compile(r"^assert (?P<what>.{3,120})$")
_WORD = re.compile(r"[a-z]\w*_\w+")  # of an assertion, a name that a caller may pass


def misfit(failure: Failure, source: str, texts: Sequence[tuple[str, str]]) -> Said | None:
    """Return the caller and the function, with the argument or name that it lacks or does not expect.

    `source` is the line of source that the traceback shows last, `texts` are the run's files by name.
    """
    return (
        handed_on(failure, texts)
        or _lacking(failure)
        or signatures.unfit(failure, source)
        or _another_kind(failure)
        or _of_settings(failure)
        or _misplaced(failure, source)
        or _asserted(failure, source)
    )


def handed_on(failure: Failure, texts: Sequence[tuple[str, str]]) -> Said | None:
    """Return the place of an argument in the run's own file that a library passes on to code without it."""
    match = _UNEXPECTED.search(failure.text)
    place = sign_in([f"{match['name']}="], _with_any_value(texts)) if match else None
    if match is None or place is None:
        return None
    where = place.partition("(")[2].rstrip(")")
    through = _package(failure.frames[-1]) if failure.frames else ""
    by = f", through {through}" if through else ""
    return Said(
        f"{where} passes {match['name']}: the called code does not take it (any more) and hands it on{by} to "
        f"{match['called']}, without such an argument",
        (
            f"without {match['name']} at {where}",
            "or the argument's new place, from the release notes",
        ),
    )


def _with_any_value(texts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return `texts` with False arguments counted as set: they are passed all the same."""
    return [(name, re.sub(r"(?<==)(?:False|None|0)\b", "x", text)) for name, text in texts]


def _lacking(failure: Failure) -> Said | None:
    """Return the two libraries that do not fit, if one asks the other for a missing name or argument."""
    asks = caller(failure)
    if (own := _NO_MODULE.search(failure.text)) and own["package"] == asks:
        return Said(
            f"the installed {asks} is not whole: {own[0]}, its own: built without that folder, or a mix of releases",
            (f"a newer {asks}, or its source tree installed in place after pip uninstall", *off(failure)),
        )
    if match := _MISSING_NAME.search(failure.text) or _MISSING_PART.search(failure.text):
        called = match["module"].partition(".")[0]
        lacks = f"{match['module']} has no {match['name']}"
    elif match := _UNEXPECTED.search(failure.text):
        called, lacks = "", f"{match['called']} has no argument {match['name']}"
    else:
        return None
    if not asks and called and failure.frames:
        return Said(
            f"releases that do not fit: {place(failure.frames[-1])} was written for another release of {called}; in "
            f"the installed one {lacks}",
            (f"the release of {called} that this script was written for, or the script's newest",),
        )
    if not asks or asks == called:
        return None
    other = called or "the library that it calls"
    return Said(
        f"releases that do not fit: {asks} was written for another release of {other}; in the installed one {lacks}",
        (
            f"{asks} and {other} from the same time: the newest of both, or the release of {other} that this "
            f"{asks} asks for (pip show {asks.replace('_', '-')})",
        ),
    )


def _another_kind(failure: Failure) -> Said | None:
    """Return the object in an offload's place, if it lacks its caller's attribute."""
    match = _NOT_OF_IT.search(failure.text)
    if match is None or not failure.frames:
        return None
    package = trainer(failure) or "the library whose frame is innermost"
    return Said(
        f"{place(failure.frames[-1])} holds a {match['kind']} without {match['name']}: the call expects another "
        "kind there, as in an engine built without an optimizer or without this offload",
        (
            f"{match['name']} of the trained model alone, not of one without an optimizer (reference, reward model)",
            f"or a newer {package}",
        ),
    )


def _of_settings(failure: Failure) -> Said | None:
    """Return the library that reads a setting missing in another one's class of settings."""
    match = _NO_SETTING.search(failure.text)
    owner = signatures.home(failure.frames[-1]) if failure.frames else ""
    if match is None or not owner or owner in _BELOW_TRAINERS:
        return None
    said = Said(
        f"releases that do not fit: {place(failure.frames[-1])} of {owner} reads {match['name']} of a {match['kind']} "
        "without it: the class is of another release",
        (
            f"{owner} and the library of {match['kind']} from the same time (pip show {owner}), or a newer {owner}",
        ),
    )
    if not match["name"].startswith(owner.partition("-")[0]):
        return said
    # A setting with the reader's own name: it replaces the class with one of its own.
    return Said(
        f"{said.cause}, or was imported before {owner} put its own in its place",
        (*said.change, f"or {owner} imported first in the script"),
    )


def _misplaced(failure: Failure, source: str) -> Said | None:
    """Return the flag that got a tensor, if a function tests a parameter with a tensor of many values."""
    match = _TESTED.match(source)
    if _AMBIGUOUS not in failure.text or match is None or len(failure.frames) < 2:
        return None
    inner = failure.frames[-1]
    outer = next(
        (each for each in reversed(failure.frames[:-1]) if _package(each) != "torch"), failure.frames[-2]
    )
    package = trainer(failure) or "the library whose frame is innermost"
    return Said(
        f"a tensor arrived in the place of {match['name']}, which {place(inner)} takes for a flag: its caller "
        f"{place(outer)} passes its arguments in another order, or one fewer",
        (f"a newer {package}, or an older one, in which both fit", *off(failure)),
    )


def _asserted(failure: Failure, source: str) -> Said | None:
    """Return the demand of an assertion without words, and its caller, where its names are the arguments."""
    match = _ASSERTED.match(source)
    if (
        failure.error != "AssertionError"
        or failure.text.strip().rstrip(":") != "AssertionError"
        or match is None
    ):
        return None
    name = _WORD.search(match["what"])
    inner = failure.frames[-1]
    outer = next((each for each in reversed(failure.frames[:-1]) if each.path != inner.path), None)
    if name is None or outer is None:
        return None
    return Said(
        f"{place(inner)} takes only calls for which {match['what']}, and {place(outer)} calls it otherwise: it was put "
        f"in the place of a function that takes more",
        (
            f"{outer.function} called without {name[0]}, or called before the code that replaces {inner.function}",
            *off(failure),
        ),
    )


def _package(frame: Frame) -> str:
    match = _SITE.search(frame.path.replace("\\", "/"))
    return match["package"] if match else ""


def caller(failure: Failure) -> str:
    """Return the package of the innermost frame that is in an installed one."""
    packages = (_SITE.search(frame.path.replace("\\", "/")) for frame in reversed(failure.frames))
    return next((match["package"] for match in packages if match), "")


def trainer(failure: Failure) -> str:
    """Return the distribution whose release decides the failure: of the innermost frame in none of torch's files."""
    for frame in reversed(failure.frames):
        path = frame.path.replace("\\", "/")
        if _COMMUNICATES in path:
            continue
        owner = signatures.home(frame)
        if owner in knowledge.index()["releases"]["known"] and owner not in _BELOW_TRAINERS:
            return owner  # before its code, which a fork of another trainer may share
        known = code.of(failure._replace(frames=(frame,)))
        if known is not None and known.code.package != "torch":
            return known.code.package
        if owner and owner not in _BELOW_TRAINERS:
            return owner
    return ""
