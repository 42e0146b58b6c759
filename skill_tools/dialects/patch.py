"""Writes a plan's settings as the user would: dotted overrides and YAML for Bridge, flags for Megatron-LM.

Spellings come from the key table. A key that a dialect cannot spell (Megatron-LM's `cpu_offloading` follows
from its layer count) is left out of the text. The text is a proposal; nothing is written to the user's
files.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from skill_tools.configs.config import Config, Framework
from skill_tools.configs.keys import Key, load_keys
from skill_tools.rules.knowledge import load_rules


class Patch(NamedTuple):
    """The change in the user's dialect: `overrides` for a command line, `text` for a file, or what to remove;
    `environment` what to export first."""

    dialect: str
    settings: Mapping[str, object]
    overrides: str
    text: str
    environment: str = ""


def render(
    dialect: str,
    settings: Mapping[str, object],
    *,
    config: Config | None = None,
    keys: Mapping[str, Key] | None = None,
) -> Patch:
    """Return `settings` in the words of `dialect`, with the spellings that `config` already uses."""
    if dialect not in set(Framework):  # a plain PyTorch loop has no settings to write
        return Patch(dialect, settings, "", "")
    table = load_keys() if keys is None else keys
    if dialect == Framework.MEGATRON_LM:
        exports, flags = _environment(settings)
        add, remove = _flags(flags, table, dead=dead_flags(config) if config else ())
        return Patch(dialect, settings, add, remove, exports)
    exports, kept = _environment(settings)
    written = {key: setting.written for key, setting in config.settings.items()} if config else {}
    spelled = {
        written.get(key) or _spelling(key, Framework(dialect), table): value for key, value in kept.items()
    }
    overrides = " ".join(f"{key}={_hydra(value)}" for key, value in spelled.items())
    shown = overrides if dialect == Framework.BRIDGE else ""
    return Patch(dialect, settings, shown, _yaml(spelled), exports)


def _environment(settings: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Split off environment variables, as the line that exports them."""
    variables = {key: value for key, value in settings.items() if key.startswith("env.")}
    exports = " ".join(f"{key.removeprefix('env.')}={value}" for key, value in variables.items())
    rest = {key: value for key, value in settings.items() if key not in variables}
    return f"export {exports}" if exports else "", rest


def _spelling(key: str, framework: Framework, table: Mapping[str, Key]) -> str:
    known = table.get(key)
    return known.spelling.get(framework, key) if known else key


def _hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _yaml(spelled: Mapping[str, object]) -> str:
    nested: dict[str, Any] = {}
    for dotted, value in spelled.items():
        *sections, name = dotted.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    if not nested:
        return ""
    import yaml

    return yaml.safe_dump(nested, sort_keys=False, default_flow_style=False)


def dead_flags(config: Config) -> tuple[str, ...]:
    """Return the flags of a launch script that no release knows and that mean to offload: each ends the run."""
    if not config.unknown:
        return ()
    claimed = {spelling for rule in load_rules() for spelling in rule.spellings}
    return tuple(dict.fromkeys(flag.written for flag in config.unknown if flag.written in claimed))


def _flags(
    settings: Mapping[str, object], table: Mapping[str, Key], *, dead: tuple[str, ...]
) -> tuple[str, str]:
    """Return the flags to add, and the line that names those to remove, `dead` ones among them."""
    add, remove = [], list(dead)
    for key, value in settings.items():
        known = table.get(key)
        flag = known.spelling.get(Framework.MEGATRON_LM) if known else None
        if flag is None:
            continue
        if not value:
            remove.append(flag)
        elif value is True:
            add.append(flag)
        else:
            add.append(f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    return " ".join(add), f"remove {' '.join(remove)}" if remove else ""
