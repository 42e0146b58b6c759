# SPDX-License-Identifier: Apache-2.0
"""Names that a release has and the knowledge, or an earlier release, has not."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from skill_tools.configs.keys import load_keys
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects import registry
from skill_tools.dialects.base import Dialect
from skill_tools.knowledge import load_yaml
from skill_tools.upkeep.summary import OFFLOAD, Summary

_OFF = (["None"], ["False"], ["0"], ["0.0"])  # a default that is one of these is the same as another of them
_SETTINGS = re.compile(r"Config|Arguments?|Args|Plugin|Schema|Params|Options|Settings|Kwargs|^[a-z_.]*$")


class Change(NamedTuple):
    """A fact of a `kind` (fields, flags, messages, logs, private) that is new, gone or has another default."""

    kind: str
    name: str
    how: str
    was: str
    now: str

    @property
    def touches_offload(self) -> bool:
        """Whether its name says that it moves memory."""
        return OFFLOAD.search(self.name) is not None


def between(old: Summary, new: Summary) -> Iterator[Change]:
    """Yield the differences between two releases, each kind in the order of its names.

    A text that only stands in another file is no change.
    """
    for (kind, before), (_, after) in zip(old.kinds(), new.kinds(), strict=True):
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                yield Change(kind, name, "gone", before[name], "")
            elif name not in before:
                yield Change(kind, name, "new", "", after[name])
            elif kind in ("fields", "flags") and before[name] != after[name]:
                yield Change(kind, name, "default", before[name], after[name])


def unknown(summary: Summary, package: str) -> Iterator[Change]:
    """Yield the offload fields and flags of a release that no dialect of `package` knows.

    Only classes called like a configuration count, unless `knowledge/reviewed.yaml` lists them as no settings of a
    training.
    """
    known = {_bare(name) for each in of_package(package) for name in load_vocabulary(each.name).names}
    known |= {_bare(key.name) for key in load_keys().values()}
    reviewed = load_yaml("reviewed.yaml").get(package, {})
    for kind, facts in (("fields", summary.fields), ("flags", summary.flags)):
        for name in sorted(facts):
            owner = name.rpartition(".")[0]
            if (kind == "fields" and not _SETTINGS.search(owner)) or {name, owner} & reviewed.keys():
                continue
            if OFFLOAD.search(name) and not _bare(name).startswith("_") and _bare(name) not in known:
                yield Change(kind, name, "unknown", "", facts[name])


def other_defaults(summary: Summary, package: str) -> Iterator[Change]:
    """Yield the recorded offload keys of `package` whose one field or flag has another default in the release."""
    found: dict[str, list[str]] = {}
    for facts in (summary.fields, summary.flags):
        for name, default in facts.items():
            found.setdefault(_bare(name), []).append(default)
    for dialect in of_package(package):
        for key in load_keys().values():
            recorded = key.default.get(dialect.name)
            if (
                dialect.name not in key.spelling
                or isinstance(recorded, list | dict)
                or not OFFLOAD.search(key.name)
            ):
                continue
            defaults = found.get(_bare(key.spelling[dialect.name]), [])
            is_same = repr(recorded) in defaults or (not recorded and defaults[:1] in _OFF)
            if len(defaults) == 1 and _is_plain(defaults[0]) and not is_same:
                yield Change("fields", key.name, "recorded default", repr(recorded), defaults[0])


def of_package(package: str) -> list[Dialect]:
    """Return the dialects whose package `package` is, or a part of it."""
    wanted = package.replace("-", "_").replace("_core", "")
    return [
        each
        for each in registry.with_files()
        if wanted in (each.package.partition("/")[0], each.name.replace("-", "_"))
    ]


def _bare(name: str) -> str:
    return name.rpartition(".")[2].rpartition(" ")[2].lstrip("-+~").replace("-", "_")


def _is_plain(default: str) -> bool:
    return default in ("True", "False", "None") or default.replace(".", "", 1).lstrip("-").isdigit()
