# SPDX-License-Identifier: Apache-2.0
"""Messages of a run that no rule about a configuration quotes: out of memory, hangs, builds, resumes, slow steps.

They are data (`knowledge/messages/*.yaml`), each with its text's source: a public thread, or a package's file with its
releases. Apart from `known_errors`, because a rule is about the user's input, and a message about an event.
"""

from collections.abc import Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.texts import HOLE, REACH, position, span

# The cause of the others comes first: a build that failed ends in a time-out of the other ranks, not the other way.
ORDER = (
    "build",
    "resume",
    "collectives",
    "devices",
    "offload",
    "host-memory",
    "locked-memory",
    "pinned-memory",
    "shared-memory",
    "gpu-memory",
    "killed",
    "numerics",
    "hang",
    "crash",
    "slow",
)
# A process that was killed (SIGKILL) leaves no reason; without another, it was most often the host's memory.
HOST_RAN_OUT = frozenset({"host-memory", "killed"})
OF_THE_HOST = HOST_RAN_OUT | {"pinned-memory", "locked-memory", "shared-memory"}
PINNED = "pinned-memory"  # an exception may need it: the run pins host memory, as each offload does
ANSWERS = frozenset({"exception", "consequence"})  # roles that may be the answer whatever else the log says


class Message(NamedTuple):
    """One known text: its cause, the change, and rules that tell more.

    `role` is the part of the text: the `exception` that ended something, a `consequence` of a cause elsewhere, a
    `notice` for runs with its subject (`needs`, a mechanism), or `chatter`, a mere sign of a running mechanism
    (`shows`). An exception that `needs` pinned memory counts if the run offloads or pins anything. `frames` are
    required parts of files or functions in the traceback.
    """

    id: str
    role: str
    kind: str
    texts: tuple[str, ...]
    frames: tuple[str, ...]
    cause: str
    change: tuple[str, ...]
    rule: str
    explained_by: tuple[str, ...]
    needs: str
    shows: str
    source: str


class Seen(NamedTuple):
    """A message in a log: its line, and whether it stands in the exception that ended the run."""

    line: int
    text: str
    message: Message
    at: int = 0
    ended_the_run: bool = False


@knowledge.derived
def load_messages() -> tuple[Message, ...]:
    """Return every known message."""
    return tuple(map(from_data, knowledge.index()["messages"]))


def from_data(entry: dict[str, object]) -> Message:
    """Return one entry of the files as a message."""

    def several(name: str) -> tuple[str, ...]:
        given = entry.get(name, [])
        return tuple(map(str, given)) if isinstance(given, list) else (str(given),)

    return Message(
        id=str(entry["id"]),
        role=str(entry["role"]),
        kind=str(entry["kind"]),
        texts=several("text"),
        frames=several("frames"),
        cause=str(entry.get("cause", "")),
        change=several("change"),
        rule=str(entry.get("rule", "")),
        explained_by=several("explained_by"),
        needs=str(entry.get("needs", "")),
        shows=str(entry.get("shows", "")),
        source=str(entry["source"]),
    )


def find(log: Log, ended_by: Failure | None = None) -> tuple[Seen, ...]:
    """Return the messages in `log`: first of the exception that ended the run, then causes of others, then the rest.

    Of several whose frames the traceback goes through, the one with more frames is more exact, then the inner one; of
    several in one line, or in the exception, the one with the longer text.
    """
    found: list[tuple[bool, int, int, int, int, int, Seen]] = []
    for message in load_messages():
        start, inside = _place(message, log, ended_by)
        if start < 0:
            continue
        seen = Seen(log.line_at(start), log.context(start), message, start, inside)
        depth = _depth(message.frames, ended_by) if inside and ended_by is not None else 0
        line, words = (
            0
            if inside
            else log.text.rfind("\n", 0, start),  # a text with a hole may begin in a traceback's source
            max(len(text.replace(HOLE, "")) for text in message.texts),
        )
        rank = (not inside, -len(message.frames), -depth, ORDER.index(message.kind), line, -words)
        found.append((*rank, seen))
    return tuple(seen for *_, seen in sorted(found, key=lambda each: each[:6]))


def _place(message: Message, log: Log, ended_by: Failure | None) -> tuple[int, bool]:
    """Return the place of `message` (-1: nowhere), and whether the exception that ended the run contains it.

    One with frames has no other place.
    """
    if ended_by is not None and _goes_through(message.frames, ended_by):
        for text in message.texts:
            start = _span_in(text, log, ended_by)
            if start >= 0:
                return start, True
    if message.frames:
        return -1, False
    places = [place for text in message.texts if (place := position(log.text, text)) >= 0]
    return min(places, default=-1), False


def _span_in(text: str, log: Log, ended_by: Failure) -> int:
    """Return the start of `text` inside the ending exception, or reaching into it; else -1."""
    for first in (ended_by.start, max(0, ended_by.start - REACH)):
        start, end = span(log.text, text, first)
        if start >= 0 and ended_by.meets(start, end):
            return start
    return -1


def _goes_through(frames: Sequence[str], failure: Failure) -> bool:
    return all(any(_is_of(part, frame) for frame in failure.frames) for part in frames)


def _depth(frames: Sequence[str], failure: Failure) -> int:
    """Return how far in the innermost frame of `failure` is that any of `frames` names."""
    named = (
        place for place, frame in enumerate(failure.frames, 1) if any(_is_of(part, frame) for part in frames)
    )
    return max(named, default=0)


def _is_of(part: str, frame: Frame) -> bool:
    return part in frame.path or part == frame.function
