# SPDX-License-Identifier: Apache-2.0
"""The configuration that `plan` and `diagnose` read: files with the overrides on top, each of which somebody reads."""

import argparse
from collections.abc import Iterator, Sequence

from skill_tools.configs.config import Config
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source, load
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects import registry
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.nearest import nearest

_OVERRIDES = "<overrides>"  # the file of a place in them


def read_config(args: argparse.Namespace, files: Sequence[str]) -> Config:
    """Return the configuration in `files` with the overrides on top; without files, the overrides alone.

    If the stated framework has no files of its own, the files say theirs.
    """
    return _read(args, files, [load(path) for path in files], args.overrides)


def read_to_plan(args: argparse.Namespace, files: Sequence[str], what_if: Sequence[str]) -> Config:
    """Return the same under `what_if`; raises `UnusableInput` for an override that nothing reads.

    With one the plan would be that of a run without it, and would not say so.
    """
    sources, overrides = [load(path) for path in files], [*args.overrides, *what_if]
    config = _read(args, files, sources, overrides)
    _require_read(config, sources, overrides)
    return config


def _read(
    args: argparse.Namespace, files: Sequence[str], sources: Sequence[Source], overrides: Sequence[str]
) -> Config:
    from skill_tools.dialects.read import check_form, read_sources

    named = stated(args, files)
    framework = named if named and (not files or registry.named(named).has_files) else None
    try:
        return read_sources(sources, overrides=overrides, framework=framework)
    except Unrecognised:
        try:
            check_form(sources)
        except UnusableInput as form:
            raise Unrecognised(form.problem, expected=form.expected, attempt=form.attempt) from None
        raise


def stated(args: argparse.Namespace, files: Sequence[str]) -> str | None:
    """Return the stated framework, or the one for a model without any file."""
    return str(args.framework) if args.framework else None if files else registry.WITHOUT_FILES


def not_counted(config: Config) -> Iterator[Assumption]:
    """Yield an assumption for each override in a section that takes any name, if a known one there is like its own."""
    known, keys = load_vocabulary(config.framework), load_keys()
    for setting in config.settings.values():
        written = setting.written
        if setting.place.file != _OVERRIDES or setting.key in keys or written in known.names:
            continue
        section = f"{written.rpartition('.')[0]}."
        if known.accepts(written) and (
            near := nearest(written, [name for name in known.names if name.startswith(section)], count=1)
        ):
            text = f"--overrides {written}: counted for nothing, as its name is not known; {near[0]} is"
            yield Assumption(text, About.UNREAD_FILE)


def _require_read(config: Config, sources: Sequence[Source], overrides: Sequence[str]) -> None:
    """Raise `UnusableInput` for an override that the framework does not know, and for one that changes nothing."""
    if registry.named(config.framework).no_plan:  # some of those readers know few of the framework's keys
        return
    for unknown in config.unknown:
        if unknown.place.file == _OVERRIDES:
            raise _unread(config.framework, unknown.written, unknown.nearest)
    without = _composed(config.framework, sources, ())
    for text in filter(str.strip, overrides):
        if without is not None and _composed(config.framework, sources, [text]) == without:
            raise _unread(config.framework, text)


def _unread(framework: str, text: str, meant: tuple[str, ...] = ()) -> UnusableInput:
    label, known = registry.named(framework).label, load_vocabulary(framework)
    name, equals, value = text.strip().partition("=")
    if equals and known.accepts(name):
        meant = (f'--overrides="--{name} {value}"',)
    if name and not meant:
        meant = known.nearest(name.split()[0])
    return UnusableInput(
        f"--overrides {text}: {label} reads nothing of that name and form",
        expected=f"a setting as {label} spells it",
        attempt=" or ".join(meant) or "the plan without it",
    )


def _composed(framework: str, sources: Sequence[Source], overrides: Sequence[str]) -> Config | None:
    """Return the configuration under `overrides`; None where the others are needed to read it."""
    from skill_tools.dialects.read import read_sources

    try:
        return read_sources(sources, overrides=overrides, framework=framework)
    except UnusableInput:
        return None
