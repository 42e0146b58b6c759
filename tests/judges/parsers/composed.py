# SPDX-License-Identifier: Apache-2.0
"""Our readers' values of a configuration that a framework composes, and how to compare it with the real one."""

from collections.abc import Sequence
from typing import Any

from parser_answers import name_of

from skill_tools.configs.config import Config
from skill_tools.configs.keys import load_key_table

Answer = dict[str, Any]
BY_RELEASE = "yaml-by-release"  # a fault that names a difference of releases, and refuses nothing


def believed_of(config: Config, names: Sequence[str]) -> dict[str, Any]:
    """Return the values that are set, by the framework's own names; raise for words that our reader refuses."""
    refused = [*config.unknown, *(each for each in config.faults if each.rule != BY_RELEASE)]
    if refused:
        raise ValueError(str(refused)[:200])
    keys = {name: load_key_table().find(config.framework, name) for name in names}
    canonical = {name: key.name if key is not None else name for name, key in keys.items()}
    values = {name: config.settings[key].value for name, key in canonical.items() if key in config.settings}
    return values | {name: "???" for name, key in canonical.items() if key in config.unresolved}


def same_values(real: Answer, mine: Answer) -> bool:
    """Return whether both refuse, or hold the same values for the same names; a whole float is its integer."""
    if "raised" in real or "raised" in mine:
        return "raised" in real and "raised" in mine
    held, believed = dict(real["value"]["map"]), dict(mine["value"]["map"])
    return held.keys() == believed.keys() and all(
        _plain(held[each]) == _plain(believed[each]) for each in held
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict) and "map" in value:
        return {name_of(name): _plain(each) for name, each in value["map"]}
    is_float = isinstance(value, dict) and "float" in value
    number = float(value["float"]) if is_float else value
    return "nan" if number != number else number
