"""Messages of a run that no rule about a configuration quotes: out of memory, hangs, builds, resumes, slow steps.

They are data (`knowledge/messages.yaml`), each with the public thread that its text comes from. Apart from
`known_errors`, because a rule is about what a user wrote, and a message about what happened.
"""

from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.texts import position

# What causes the others comes first: a build that failed ends in a time-out of the other ranks, not the other way.
ORDER = (
    "build",
    "resume",
    "collectives",
    "host-memory",
    "locked-memory",
    "pinned-memory",
    "shared-memory",
    "gpu-memory",
    "killed",
    "numerics",
    "hang",
    "slow",
)
# A process that was killed (SIGKILL) leaves no reason; without another, it was most often the host's memory.
HOST_RAN_OUT = frozenset({"host-memory", "killed"})
OF_THE_HOST = HOST_RAN_OUT | {"pinned-memory", "locked-memory", "shared-memory"}


class Message(NamedTuple):
    """One known text: why it appears, the lines to change, and rules that tell more."""

    id: str
    kind: str
    texts: tuple[str, ...]
    cause: str
    change: tuple[str, ...]
    rule: str
    explained_by: tuple[str, ...]
    source: str


class Seen(NamedTuple):
    """A message in a log, at its first place."""

    line: int
    text: str
    message: Message


@knowledge.derived
def load_messages() -> tuple[Message, ...]:
    """Return every known message."""
    return tuple(map(from_data, knowledge.index()["messages"]))


def from_data(entry: dict[str, object]) -> Message:
    """Return one entry of the file as a message."""
    text, change, explained_by = entry["text"], entry["change"], entry.get("explained_by", [])
    assert isinstance(change, list) and isinstance(explained_by, list)  # noqa: PT018 - the schema says so
    return Message(
        id=str(entry["id"]),
        kind=str(entry["kind"]),
        texts=tuple(map(str, text)) if isinstance(text, list) else (str(text),),
        cause=str(entry["cause"]),
        change=tuple(map(str, change)),
        rule=str(entry.get("rule", "")),
        explained_by=tuple(map(str, explained_by)),
        source=str(entry["source"]),
    )


def find(log: Log) -> tuple[Seen, ...]:
    """Return the messages in `log`, what causes others first, then in the log's order."""
    found: list[tuple[int, int, Seen]] = []
    for message in load_messages():
        places = [place for text in message.texts if (place := position(log.text, text)) >= 0]
        if places:
            first = min(places)
            seen = Seen(log.line_at(first), log.context(first), message)
            found.append((ORDER.index(message.kind), first, seen))
    return tuple(seen for _, _, seen in sorted(found, key=lambda each: each[:2]))
