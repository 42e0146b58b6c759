# SPDX-License-Identifier: Apache-2.0
"""The owner of a failure's code, the configuration's offload there, and an experiment that tells its causes apart.

Apart because an answer without a cause still has this much.
"""

from collections.abc import Mapping
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Config, Setting
from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis.failures import Failure, Frame

_OFF = (False, None, 0, 0.0, "none", "false", "", "off", "0")
_OFFLOADS = frozenset(
    (
        "layer-activation-offload",
        "fine-grained-offload",
        "optimizer-offload",
        "state-offload",
        "layer-streaming",
        "checkpoint-offload",
    )
)
_MOST = 3


class Code(NamedTuple):
    """Code that carries out offloads: its name in a sentence, its mechanisms, package and classes, and an experiment.

    Without mechanisms it is a framework's whole code, which does much more than offload.
    """

    path: str
    name: str
    mechanisms: tuple[str, ...]
    package: str
    decide: tuple[str, ...]
    classes: tuple[str, ...]


class Where(NamedTuple):
    """The innermost frame of a failure in known code, and that code."""

    frame: Frame
    code: Code


@knowledge.derived
def load_code() -> tuple[Code, ...]:
    """Return every known code, the most exact first."""
    return tuple(
        Code(
            entry["path"],
            entry["code"],
            tuple(entry.get("mechanisms", ())),
            entry["package"],
            tuple(entry["decide"]),
            tuple(entry.get("classes", ())),
        )
        for entry in knowledge.index()["code"]
    )


def of(failure: Failure) -> Where | None:
    """Return the most exact code of a frame of `failure`; None if no frame is in known code."""
    known = (
        (order, Where(frame, code))
        for frame in reversed(failure.frames)
        for order, code in enumerate(load_code())
        if code.path in frame.path.replace("\\", "/")
    )
    first = min(known, key=lambda each: each[0], default=None)
    return first[1] if first else None


def offloads(config: Config | None, mechanisms: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """Return the settings of `config` that offload something: by `mechanisms`, or, without any of these, at all."""
    keys = load_keys()
    on = _switched_on(config)
    there = tuple(each for each in on if keys[each.key].mechanism in mechanisms)
    return (there or on)[:_MOST]


def runs(config: Config | None) -> frozenset[str]:
    """Return the mechanisms of offloading that `config` switches on."""
    keys = load_keys()
    return frozenset(keys[each.key].mechanism for each in _switched_on(config))


def set_for(config: Config, mechanisms: frozenset[str]) -> tuple[Setting, ...]:
    """Return the settings of `config` that offload by one of `mechanisms`."""
    keys = load_keys()
    return tuple(each for each in _switched_on(config) if keys[each.key].mechanism in mechanisms)


def set_off(config: Config | None, mechanisms: tuple[str, ...] = ()) -> tuple[Setting, ...]:
    """Return the settings of `config` that switch an offload off, by `mechanisms` if there are any."""
    keys = load_keys()
    return tuple(
        setting
        for key, setting in (config.settings if config is not None else {}).items()
        if key in keys
        and "offload" in key.lower()
        and isinstance(setting.value, str | bool | int | float | None)
        and setting.value in _OFF
        and (not mechanisms or keys[key].mechanism in mechanisms)
    )[:_MOST]


def _switched_on(config: Config | None) -> tuple[Setting, ...]:
    if config is None:
        return ()
    known = load_keys()
    return tuple(
        setting
        for key, setting in config.settings.items()
        if key in known
        and not (isinstance(setting.value, str | bool | int | float | None) and setting.value in _OFF)
        and ("offload" in key.lower() or "nvme" in key)
        and not key.endswith(("pin_memory", "offload_optimizer", "offload_param"))
        and (known[key].mechanism in _OFFLOADS or known[key].mechanism == "parallelism")
    )


def release(package: str, stated: Mapping[str, str]) -> str:
    """Return the release of `package`, and which are known: `torch 2.7.0 (2.2.0 to 2.13.0 are known)`."""
    known = knowledge.index()["releases"]["known"].get(package, [])
    of_the_run = f"{package} {stated[package]}" if package in stated else f"{package}, release not stated"
    return f"{of_the_run} ({known[0]} to {known[-1]} are known)" if known else of_the_run
