# SPDX-License-Identifier: Apache-2.0
"""Options of a run's files, of any framework, with an offload in their name, and its kind.

No fact about a framework is needed: `tensorwise_offload_optimizer` and `offload_fraction` under `optimizer:` are about
the optimizer. Such a name shows an offload where no known sign does.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from skill_tools.diagnosis.failures import Failure

_NAMED = re.compile(
    r"(?P<name>--[\w-]{0,40}off-?load[\w-]{0,40}|\b[\w.]{0,60}offload\w{0,40})"
    r"(?:(?P<behind>[\"']?[ \t]*[:= \t][ \t]*[\"']?)(?P<value>[^\s,;}\])\"']{0,40})|[ \t]*$)",
    re.IGNORECASE | re.MULTILINE,
)
_SWITCHED_ON = re.compile(
    r"\b(?P<name>[a-zA-Z][\w-]{7,60})[\"']?(?:[ \t]*[:=][ \t]*[\"']?|[ \t]+)(?P<value>[Tt]rue)\b"
)
_USES = re.compile(r"^(?:use|enable|with)_(?P<what>\w{6,})$")  # an option called after a library
_OFF = re.compile(r"(?:false|none|null|off|no|0|0\.0*|disabled?)$", re.IGNORECASE)
_COMMENT = re.compile(r"^\s*(?:#|//|def |class |import |from )")
_HYPHEN = "--"
_MOST_TEXT = 1 << 20
# The kind of offload (an entry of offloads.yaml) for words of a name, or of its line; the first that fits.
_KINDS = (
    ("activation", re.compile(r"activ|(?<![a-z])acts?(?![a-z])|hidden|recompute|grad\w*_checkpoint")),
    ("optimizer", re.compile(r"optim|adam|moment|master|opt_state")),
    ("block-swap", re.compile(r"layer|block|swap")),
    ("params", re.compile(r"param|weight|fsdp|(?<![a-z])dit(?![a-z])|unet|transformer")),
    ("phases", re.compile(r"rollout|actor|policy|train|ref(?:erence)?\b|model|phase|engine")),
)


class Option(NamedTuple):
    """An option as it is written, its value, and its place (`file:line`)."""

    name: str
    value: str
    place: str


def of_offloads(texts: Sequence[tuple[str, str]]) -> tuple[Option, ...]:
    """Return the switched-on options in the run's files with an offload in their name, by name and text."""
    found: dict[str, Option] = {}
    for file, text in texts:
        for match in _NAMED.finditer(text[:_MOST_TEXT]):
            start = text.rfind("\n", 0, match.start()) + 1
            value, behind = match["value"] or "", match["behind"] or ""
            assigned = behind.strip(" \t\"'") or match["name"].startswith(_HYPHEN)
            if not assigned or _OFF.match(value) or _COMMENT.match(text[start : match.end()]):
                continue
            place = f"{file}:{text.count(chr(10), 0, match.start()) + 1}"
            found.setdefault(match["name"], Option(match["name"], value, place))
    return tuple(found.values())


def of_the_code(failure: Failure, texts: Sequence[tuple[str, str]]) -> Option | None:
    """Return a switched-on option of the run's files with its name inside that of a function in the traceback.

    `layered_summon=True` leads to layered_summon_lora_params, and `use_unsloth: true` to the library's own code.
    """
    functions = [frame.function for frame in reversed(failure.frames) if "_" in frame.function]
    folders = "".join(frame.path.replace("\\", "/").rpartition("/")[0] + "/" for frame in failure.frames)
    for file, text in texts:
        for match in _SWITCHED_ON.finditer(text[:_MOST_TEXT]):
            name = match["name"].replace("-", "_")
            uses = _USES.match(name)
            if ("_" in name and any(name in function and name != function for function in functions)) or (
                uses is not None and f"-packages/{uses['what']}/" in folders
            ):
                return Option(
                    match["name"], match["value"], f"{file}:{text.count(chr(10), 0, match.start()) + 1}"
                )
    return None


def kinds(texts: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return the kinds of offload that such options name, each with its option and its place."""
    shown: dict[str, str] = {}
    lines = {
        f"{file}:{number}": line for file, text in texts for number, line in enumerate(text.splitlines(), 1)
    }
    for option in of_offloads(texts):
        # A flag's line is a command with words about all else: `train.py --offload`.
        beside = option.value if option.name.startswith(_HYPHEN) else lines.get(option.place, "")
        named = kind(option.name) or kind(beside)
        if named:
            shown.setdefault(named, f"{option.name} ({option.place})")
    return shown


def kind(words: str) -> str:
    """Return the kind of offload that words about one name; "" if none."""
    words = words.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(words)), "")
