# SPDX-License-Identifier: Apache-2.0
"""An unknown failure under an offload of the run: its kind, and its likeliest cause.

A kind of failure (two devices, lost memory, unfitting saved tensors) has other causes under each kind of offload. A
run's offloads are read from its configuration, from any of its files (also without a dialect), from its log, and from
the code in its traceback. `knowledge/symptoms.yaml` and `offloads.yaml` have both.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config, Setting
from skill_tools.diagnosis import code, options
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.texts import position
from skill_tools.rules.fixes import spell

_ANY = "any"
_DEVICES = ("cpu", "nvme", "disk", "true", "auto", "legacy", "hidden_states")
_MOST_TEXT = 1 << 20  # characters of a log searched for signs, at its beginning and at its end
# The words behind a switched-off option.
_OFF = re.compile(
    r"""["']?\s*[:=\s]\s*(?:\{\s*["']?device["']?\s*:\s*)?["']?(?:false|none|null|off|no|0(?:\.0)?)\b(?!\.)""",
    re.IGNORECASE,
)
_ONE = re.compile(r"""["']?\s*[:=\s]\s*["']?1\b(?!\.)""")
_TWO_GPUS = re.compile(r"cuda:\d+ and cuda:\d+")
_OVER_GPUS = "device-map"  # the offload that spreads a model over several GPUs
_FSDP, _FSDP_CODE = ("fsdp", "FSDP", "fully_shard"), "torch/distributed/fsdp"
_COUNTED = "accum"  # counted from one on: one is none
_COMMENT = re.compile(r"^\s*(?:#|//)")


class Offload(NamedTuple):
    """A kind of offload: its name, its signs in a text, its code, its mechanisms, and how it is switched off.

    An offload that `moves` nothing keeps tensors in another form, such as shards, and is no cause of wrong numbers.
    """

    id: str
    name: str
    signs: tuple[str, ...]
    code: tuple[str, ...]
    mechanisms: frozenset[str]
    without: str
    moves: bool


class Cause(NamedTuple):
    """Why failures of a kind happen under an offload.

    `inside`: its own code has raised them. `resumed`: the run goes on from a checkpoint.
    """

    offload: str
    frames: tuple[str, ...]
    phase: str
    inside: bool
    resumed: bool
    cause: str
    change: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether it asks for more than the offload and a part of the run."""
        return bool(self.frames) or self.inside or self.resumed


class Symptom(NamedTuple):
    """A kind of failure: its words, excluded words (`but`), its frames, and causes, most exact first."""

    id: str
    texts: tuple[str, ...]
    but: tuple[str, ...]
    frames: tuple[str, ...]
    causes: tuple[Cause, ...]


class Explained(NamedTuple):
    """The cause that fits a failure, the offload, its sign in the run, and the change."""

    cause: Cause
    offload: Offload
    shown_by: str
    change: tuple[str, ...]


@knowledge.derived
def load_offloads() -> Mapping[str, Offload]:
    """Return every kind of offload by its name."""
    return {
        entry["offload"]: Offload(
            entry["offload"],
            entry["name"],
            tuple(entry["signs"]),
            tuple(entry.get("code", ())),
            frozenset(entry.get("mechanisms", ())),
            entry["without"],
            entry.get("moves", True),
        )
        for entry in knowledge.index()["offloads"]
    }


@knowledge.derived
def load_symptoms() -> tuple[Symptom, ...]:
    """Return every kind of failure, in the file's order."""
    return tuple(
        Symptom(
            entry["symptom"],
            tuple(entry["text"]),
            tuple(entry.get("but", ())),
            tuple(entry.get("frames", ())),
            tuple(
                Cause(
                    offload,
                    tuple(each.get("frames", ())),
                    each.get("phase", ""),
                    each.get("inside", False),
                    each.get("resumed", False),
                    each["cause"],
                    tuple(each["change"]),
                )
                for each in entry["causes"]
                for offload in named(each["offload"])
            ),
        )
        for entry in knowledge.index()["symptoms"]
    )


def named(offload: str | Sequence[str]) -> tuple[str, ...]:
    """Return the offloads of an entry, one or several."""
    return (offload,) if isinstance(offload, str) else tuple(offload)


def explain(
    failure: Failure, said: str, phase: Phase, running: Mapping[str, str], *, resumed: bool = False
) -> Explained | None:
    """Return the first cause that fits `failure` with the text `said`; `running` shows each offload of the run."""
    inner = of_the_code(failure)
    for symptom in load_symptoms():
        if not shows(symptom, failure, said):
            continue
        for cause in symptom.causes:
            offloads = running if cause.offload == _ANY else (cause.offload,)
            for name in offloads:
                if (
                    name in running
                    and (name == _OVER_GPUS or not is_between_gpus(said))
                    and (resumed or not cause.resumed)
                    and _fits(cause, name, failure, phase, inner)
                ):
                    offload = load_offloads()[name]
                    return Explained(cause, offload, running[name], cause.change)
    return None


def is_between_gpus(said: str) -> bool:
    """Return whether a failure is about tensors on two GPUs, which no offload to the CPU gives."""
    return _TWO_GPUS.search(said) is not None


def shows(symptom: Symptom, failure: Failure, said: str) -> bool:
    """Return whether `failure`, whose text begins `said`, is of the kind `symptom`."""
    return _says(said, symptom.texts) and not _says(said, symptom.but) and _passes(failure, symptom.frames)


def read(log: Log, files: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the names and texts in which signs are looked for: a run's files, and the edges of its log."""
    edges = (
        log.text if len(log.text) <= 2 * _MOST_TEXT else f"{log.text[:_MOST_TEXT]}\n{log.text[-_MOST_TEXT:]}"
    )
    return (*files, (log.name, edges))


def running(
    texts: Sequence[tuple[str, str]], failure: Failure | None, config: Config | None
) -> dict[str, str]:
    """Return the sign of each offload of the run: a setting, a place in one of its `texts` (`read`), or a frame."""
    shown: dict[str, str] = {}
    for offload in load_offloads().values():
        inside = failure and next(
            (frame for frame in failure.frames if any(part in _path(frame.path) for part in offload.code)),
            None,
        )
        if (setting := _setting(offload, config)) is not None:
            shown[offload.id] = f"{setting.written} ({setting.place.file}:{setting.place.line})"
        elif (sign := sign_in(offload.signs, texts)) is not None:
            shown[offload.id] = sign
        elif inside:
            shown[offload.id] = f"{_path(inside.path).rpartition('/')[2]}:{inside.line} {inside.function}"
    if "cpu" in shown and not {"params", "zero3"} & shown.keys() and _is_sharded(texts, failure):
        shown = {"params": shown["cpu"], **shown}
    # An offload's name is read if there is no known sign: a framework that nobody here has read.
    return shown or dict(options.kinds(texts))


def _is_sharded(texts: Sequence[tuple[str, str]], failure: Failure | None) -> bool:
    """Return whether FSDP shards the run, whose one offload keeps parameters, gradients and states on the CPU."""
    frames = failure.frames if failure else ()
    return sign_in(_FSDP, texts) is not None or any(_FSDP_CODE in _path(frame.path) for frame in frames)


def switched_off(offload: Offload, config: Config | None) -> str:
    """Return how the run's own configuration switches `offload` off, else how it is switched off anywhere."""
    setting = _setting(offload, config)
    # A text that is no device, such as the name of a rollout engine, shows the offload and does not switch it.
    if setting is None or config is None or not _is_a_switch(setting.value):
        return offload.without
    last = setting.key.rpartition(".")[2]
    if "." in setting.key and last not in setting.written.replace("-", "_"):
        return offload.without  # it comes with a file or a strategy that the trainer has by name
    if setting.written.startswith("--") and isinstance(setting.value, bool):
        return f"without {setting.written}"
    return spell(config.framework, setting.written, _off(setting.value))


def _is_a_switch(value: object) -> bool:
    return isinstance(value, int | float) or str(value).lower() in _DEVICES


def _off(value: object) -> object:
    if isinstance(value, bool):
        return False
    return 0 if isinstance(value, int | float) else "none"


def _setting(offload: Offload, config: Config | None) -> Setting | None:
    """Return the setting of `config` that switches `offload` on: one named in its signs, or of its mechanisms."""
    if config is None:
        return None
    named = (
        setting
        for setting in config.settings.values()
        if any(sign.lstrip("-") in setting.key or sign in setting.written for sign in offload.signs)
        and not isinstance(setting.value, dict | list)
        and setting.value not in (False, None, 0, "none", "false", "")
        and not setting.key.endswith("pin_memory")
    )
    return next(named, None) or next(iter(_of_mechanisms(offload, config)), None)


def _of_mechanisms(offload: Offload, config: Config) -> Sequence[Setting]:
    """Return the settings of the mechanisms of `offload` that no other offload's sign names."""
    if not offload.mechanisms:
        return ()
    return [
        setting
        for setting in code.set_for(config, offload.mechanisms)
        if not any(
            sign.lstrip("-") in setting.key
            for other in load_offloads().values()
            if other.id != offload.id
            for sign in other.signs
        )
    ]


def sign_in(signs: Sequence[str], read: Iterable[tuple[str, str]]) -> str | None:
    """Return the first sign that stands in a text and is not switched off there, with its place."""
    for name, text in read:
        for sign in signs:
            start = text.find(sign)
            while start >= 0:
                line = text[text.rfind("\n", 0, start) + 1 : start]
                folder = "/" not in sign and text[start + len(sign) : start + len(sign) + 1] == "/"
                if not (_COMMENT.match(line) or folder or _is_off(sign, text, start + len(sign))):
                    return f"{sign} ({name}:{text.count(chr(10), 0, start) + 1})"
                start = text.find(sign, start + 1)
    return None


def _is_off(sign: str, text: str, end: int) -> bool:
    """Return whether the words at `end`, behind `sign`, switch it off."""
    while text[end : end + 1].isidentifier():  # a sign may be the beginning of an option
        end += 1
    return bool(_OFF.match(text, end) or (_COUNTED in sign and _ONE.match(text, end)))


def _says(said: str, texts: Sequence[str]) -> bool:
    return any(position(said, text) >= 0 for text in texts)


def _passes(failure: Failure, frames: Sequence[str]) -> bool:
    return all(
        any(part in _path(frame.path) or part == frame.function for frame in failure.frames)
        for part in frames
    )


def _fits(cause: Cause, offload: str, failure: Failure, phase: Phase, inner: frozenset[str]) -> bool:
    return (
        _passes(failure, cause.frames)
        and (not cause.phase or cause.phase == phase)
        and (not cause.inside or offload in inner)
    )


def of_the_code(failure: Failure) -> frozenset[str]:
    """Return the offloads whose own code the traceback goes through."""
    return frozenset(
        offload.id
        for offload in load_offloads().values()
        if any(part in _path(frame.path) for frame in failure.frames for part in offload.code)
    )


def _path(path: str) -> str:
    return path.replace("\\", "/")
