# SPDX-License-Identifier: Apache-2.0
"""A Python error inside of a library's own code: the object that the code met, and the feature beside the offload.

No user passes a None into a library's private record. Such an error is the library's own: of one release, or of two
features that nobody ran together. No fact about the library is needed: the exception and its line of source tell the
object, and the frames the code's library and the neighbour.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.code import load_code
from skill_tools.diagnosis.exceptions.signatures import home, place
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.symptoms import sign_in

_ERRORS = frozenset(
    (
        "AttributeError",
        "TypeError",
        "KeyError",
        "IndexError",
        "NameError",
        "UnboundLocalError",
        "AssertionError",
    )
)
# Texts of Python's own, not of a check by the library.
_OF_PYTHON = re.compile(
    r"ValueError: (?:(?:max|min)\(\)|not enough values to unpack|too many values to unpack|list\.remove)"
    r"|ZeroDivisionError: "
)
# Code that fails by the run's data or the user's arguments, whatever is offloaded.
_OF_THE_USER = re.compile(
    r"(?i)dataset|dataloader|collat|tokeniz|/data/|processing_|templates?/|reward_func|/modeling_\w+\.py|arguments"
)
_OF_AN_OFFLOAD = re.compile(
    r"(?i)off-?load|on-?load|zero|fsdp|swap|nvme|sleep|wake|[cu]a?mem\b|memory_saver|_?to_cpu|on cpu"
)
_LACKS = re.compile(r"'(?P<kind>[\w.]+)' object has no attribute '(?P<name>\w+)'")
_BELOW = ("torch", "ray", "numpy")  # packages with the innermost frames of any library
_INNERMOST = 6  # frames of a failure among which a neighbour's code counts
_LAST = 3  # frames that tell whose business a failure is
_LONGEST = 160


class Neighbour(NamedTuple):
    """A feature, the parts of frames that show its code, its options, and the run without it.

    One that `is_set` needs an option in the run's files: its code runs without it too.
    """

    name: str
    code: tuple[str, ...]
    options: tuple[str, ...]
    is_set: bool
    without: str


class Met(NamedTuple):
    """A neighbour in a failure's frames, and the run without it; `shown_by` is its option with its place, or ""."""

    name: str
    without: str
    shown_by: str

    @property
    def told(self) -> str:
        """The run without it, as a change."""
        return f"{self.without}: {self.shown_by}" if self.shown_by else self.without


@knowledge.derived
def load_neighbours() -> tuple[Neighbour, ...]:
    """Return every feature, in the file's order."""
    return tuple(
        Neighbour(
            entry["neighbour"],
            tuple(entry["code"]),
            tuple(entry["options"]),
            entry.get("set", False),
            entry["without"],
        )
        for entry in knowledge.index()["neighbours"]
    )


def neighbour(failure: Failure, texts: Sequence[tuple[str, str]], innermost: int = _INNERMOST) -> Met | None:
    """Return the feature whose code is innermost in `failure`; `texts` are the run's files by name."""
    for frame in reversed(failure.frames[-innermost:]):
        words = f"{frame.path} {frame.function}".replace("\\", "/").lower()
        for each in load_neighbours():
            if any(part.lower() in words for part in each.code):
                sign = sign_in(each.options, texts) or ""
                if sign or not each.is_set:
                    return Met(each.name, each.without, sign)
    return None


def met(failure: Failure, source: str) -> str:
    """Return the object that a library's code met, in words: `reset (cache.py:7) has a list in cache, which has no
    zero_`.

    `source` is the line of source that the traceback shows last. "" for an error of another kind, of a script of the
    user's own, or among the run's data.
    """
    error = failure.error.rpartition(".")[2]
    frames = [frame for frame in failure.frames if home(frame) not in _BELOW]
    is_own = error in _ERRORS or _OF_PYTHON.search(failure.text)
    if not is_own or not frames or _is_of_the_user(failure.frames):
        return ""
    inner, said = frames[-1], failure.text.partition(": ")[2].strip()[:_LONGEST]
    if match := _LACKS.search(failure.text):
        what = _before(source, f".{match['name']}")
        if match["kind"] == "NoneType":
            return f"{place(inner)} finds None in {what or 'a place'} where it expects something with {match['name']}"
        return f"{place(inner)} has a {match['kind']} in {what or 'a place'}, which has no {match['name']}"
    if error in ("KeyError", "IndexError"):
        record = _before(source, "[") or "a record"
        return f"{place(inner)} looks {said or 'a number'} up in {record}, which does not have it"
    if error == "AssertionError" and not said:
        said = source.removeprefix("assert ")[:_LONGEST]
        return f"{place(inner)} asserts {said}, which does not hold" if said else ""
    return f"{place(inner)} says {said}" if said else ""


def made_by(failure: Failure) -> str:
    """Return the library of the class that lacks what the code asks of it, or "" for a class of many libraries."""
    match = _LACKS.search(failure.text)
    return next((each.package for each in load_code() if match and match["kind"] in each.classes), "")


def is_about(failure: Failure) -> bool:
    """Return whether the words of `failure`, or its innermost frames, speak of an offload."""
    frames = " ".join(f"{frame.path} {frame.function}" for frame in failure.frames[-_LAST:])
    return _OF_AN_OFFLOAD.search(f"{frames} {failure.text}") is not None


def _is_of_the_user(frames: Sequence[Frame]) -> bool:
    words = [f"{frame.path} {frame.function}".replace("\\", "/") for frame in frames[-_LAST:]]
    if _OF_AN_OFFLOAD.search(words[-1]):
        # Whoever called an offload's own code, the fault is below.
        words = words[-1:]
    return any(_OF_THE_USER.search(each) for each in words)


def _before(source: str, mark: str) -> str:
    """Return the expression of a line of source that stands before `mark`."""
    match = re.search(rf"(?P<what>[A-Za-z_][\w.]*(?:\([\w., ]*\)[\w.]*)?){re.escape(mark)}", source)
    return match["what"] if match else ""
