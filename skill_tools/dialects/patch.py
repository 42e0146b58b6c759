# SPDX-License-Identifier: Apache-2.0
"""A plan's proposal as text: the change that a user makes, and how settings become YAML or exports.

The text is a proposal; nothing is written to the user's files. Its dialect decides how a framework spells and
combines the parts (`Dialect.patch`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from skill_tools.configs.config import Config
from skill_tools.configs.source import Kind, Source


class Patch(NamedTuple):
    """The change in the user's dialect: `overrides` for a command line, `text` for a file, or keys to remove;
    `environment` to export first, `removal` the keys to remove where `text` is for a file."""

    dialect: str
    settings: Mapping[str, object]
    overrides: str
    text: str
    environment: str = ""
    removal: str = ""


def exports(settings: Mapping[str, object], config: Config | None = None) -> tuple[str, dict[str, object]]:
    """Split off environment variables, as the line that exports them; a Python script may give them to itself."""
    variables = {key: value for key, value in settings.items() if key.startswith("env.")}
    assigned = " ".join(f"{key.removeprefix('env.')}={value}" for key, value in variables.items())
    rest = {key: value for key, value in settings.items() if key not in variables}
    given = [config.settings[key].place.file for key in variables if config and key in config.settings]
    how = "in os.environ:" if any(file.endswith(".py") for file in given) else "export"
    return f"{how} {assigned}" if assigned else "", rest


def in_named_files(settings: Mapping[str, object], config: Config | None) -> tuple[str, Mapping[str, object]]:
    """Split off the settings for a JSON named by the configuration, such as `deepspeed: zero3.json`.

    It is shown as the entries of that file, below a comment with its name: the whole is still YAML.
    """
    named: dict[str, dict[str, object]] = {}
    rest: dict[str, object] = {}
    for dotted, value in settings.items():
        section, _, inside = dotted.partition(".")
        file = config.value(section) if config is not None and inside else None
        if isinstance(file, str) and file.endswith(".json"):
            named.setdefault(file, {})[inside] = value
        else:
            rest[dotted] = value
    if not named:
        return "", settings
    import json

    lines = []
    for file, entries in named.items():
        lines.append(f"# in {file}:")
        lines += [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in _nested(entries).items()]
    return "".join(f"{line}\n" for line in lines), rest


def in_launchers_file(
    settings: Mapping[str, object], config: Config | None
) -> tuple[str, Mapping[str, object]]:
    """Split off the settings of an embedded dialect with a YAML of its own beside a script, as entries of that file."""
    if config is None or script_of(config) is None:
        return "", settings
    lines, rest = [], dict(settings)
    for file, text in config.sources.items():
        if Source(file, text).kind is not Kind.YAML:
            continue
        owners = {config.owner(each.key) for each in config.settings.values() if each.place.file == file}
        own = {key: rest.pop(key) for key in settings if key in rest and config.owner(key) in owners}
        if own:
            present = config.settings
            spelled = {
                present[key].written if key in present else key.removeprefix(f"{config.owner(key)}."): value
                for key, value in own.items()
            }
            lines.append(f"# in {file}:\n{as_yaml(spelled)}")
    return "".join(lines), rest


def script_of(config: Config | None) -> Kind | None:
    """Return whether a script alone states the training, Python or a command; None where a file takes keys.

    A file of an embedded dialect alone, such as the launcher's beside a command, takes none of the trainer's.
    """
    if config is None:
        return None
    kinds = {
        Source(name, text).kind for name, text in config.sources.items() if not _is_of_others(config, name)
    }
    if kinds & {Kind.YAML, Kind.TOML}:
        return None
    return next((kind for kind in (Kind.PYTHON, Kind.SHELL) if kind in kinds), None)


def _is_of_others(config: Config | None, file: str) -> bool:
    if config is None:
        return False
    owners = {config.owner(each.key) for each in config.settings.values() if each.place.file == file}
    return bool(owners) and config.framework not in owners


def as_flags(arguments: Mapping[str, object]) -> str:
    """Return options of a command line, `--bf16 true`; a section is JSON, a list its words."""
    import shlex

    return " ".join(f"--{name} {shlex.quote(_text(value))}" for name, value in arguments.items())


def as_keywords(arguments: Mapping[str, object]) -> str:
    """Return arguments of a Python call, `bf16=True`."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def as_assignments(spelled: Mapping[str, object]) -> str:
    """Return dotted keys as words of a command line, `loss.chunks=8`."""
    import shlex

    return " ".join(shlex.quote(f"{dotted}={_text(value)}") for dotted, value in spelled.items())


def arguments_of(spelled: Mapping[str, object], config: Config | None) -> dict[str, Any]:
    """Return dotted keys as arguments: a section is one, with all that the input says of it."""
    sections = {dotted.partition(".")[0] for dotted in spelled if "." in dotted}
    said = {
        each.written: each.value
        for each in (config.settings.values() if config is not None else ())
        if each.written.partition(".")[0] in sections and not _is_of_others(config, each.place.file)
    }
    return _nested({**{written: value for written, value in said.items() if "." in written}, **spelled})


def _text(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def as_yaml(spelled: Mapping[str, object]) -> str:
    """Return dotted keys and their values as YAML with sections; nothing for no keys."""
    nested = _nested(spelled)
    if not nested:
        return ""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Sections in lines, lists in one."""

    Dumper.add_representer(
        list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
    )
    return yaml.dump(nested, Dumper=Dumper, sort_keys=False, default_flow_style=False)


def _nested(spelled: Mapping[str, object]) -> dict[str, Any]:
    """Return dotted keys as sections in sections."""
    nested: dict[str, Any] = {}
    for dotted, value in spelled.items():
        *sections, name = dotted.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested
