# SPDX-License-Identifier: Apache-2.0
"""Renders `docs/configuration.md` from `knowledge/keys.yaml`: every key, frameworks side by side.

Keys that switch or tune an offload mechanism come first, in full. Other keys of rules and plans follow in a shorter
table.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from skill_tools.card.blocks import table
from skill_tools.configs.values import written
from skill_tools.dialects import registry

Key = Mapping[str, Any]

_OFFLOAD = {
    "layer-activation-offload": "Layer-level activation offload",
    "fine-grained-offload": "Fine-grained activation offload",
    "checkpoint-offload": "Checkpoints and their offload",
    "optimizer-offload": "Optimizer CPU offload",
    "state-offload": "Optimizer-state offload",
    "layer-streaming": "Layer streaming",
}
_READ = {
    "parallelism": "Parallelism",
    "precision": "Precision",
    "runtime": "Runtime and environment",
    "model": "Model",
}
_HEAD = """# Configuration

Every key that a rule, a plan or a fix reads: how each framework spells it, its meaning, and since when it
exists. Rendered from `skill_tools/knowledge/keys.yaml` and `keys/` by `offload card render`.

A value in brackets is the default; `none` is a null. "recipe": Megatron Bridge's recipes usually set the key, so
an override file alone does not tell its value. "core" is a Megatron-Core release.
"""


def configuration_page(keys: Iterable[Key]) -> str:
    """Return the whole page for the entries of `keys.yaml`."""
    entries = list(keys)
    sections = [_HEAD, "## Keys that offload"]
    for mechanism, title in _OFFLOAD.items():
        sections.append(f"### {title}\n\n{_full(_of(entries, mechanism))}")
    sections.append("## Keys that decide legality and memory")
    for mechanism, title in _READ.items():
        sections.append(f"### {title}\n\n{_short(_of(entries, mechanism))}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _columns(keys: list[Key]) -> dict[str, str]:
    """Return the frameworks that spell any of `keys`, each with the heading of its column."""
    spelled = {name for key in keys for name in key.get("spelling", {})}
    return {dialect.name: dialect.heading for dialect in registry.with_files() if dialect.name in spelled}


def _of(keys: list[Key], mechanism: str) -> list[Key]:
    return [key for key in keys if key["mechanism"] == mechanism]


def _full(keys: list[Key]) -> str:
    columns = _columns(keys)
    return table(
        ("Key", *columns.values(), "Type", "Releases", "Note"),
        (
            (
                f"`{key['key']}`",
                *(_spelling(key, framework) for framework in columns),
                _type(key),
                _releases(key),
                _note(key),
            )
            for key in keys
        ),
    )


def _short(keys: list[Key]) -> str:
    columns = _columns(keys)
    return table(
        ("Key", *columns.values(), "Type"),
        (
            (f"`{key['key']}`", *(_spelling(key, framework) for framework in columns), _type(key))
            for key in keys
        ),
    )


def _spelling(key: Key, framework: str) -> str:
    written = key.get("spelling", {}).get(framework)
    if written is None:
        return ""
    default = key.get("default", {})
    return f"`{written}` [{_default(default[framework])}]" if framework in default else f"`{written}`"


def _default(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "; ".join(f"{_plain(one['value'])} for {_range(one['versions'])}" for one in value)
    return _plain(value)


def _plain(value: object) -> str:
    return "none" if value is None else written(value)


def _type(key: Key) -> str:
    kind = key["type"]
    name = " or ".join(sorted(set(kind.values()))) if isinstance(kind, dict) else kind
    unit = f", {key['unit']}" if "unit" in key else ""
    choices = f": {', '.join(map(written, key['choices']))}" if "choices" in key else ""
    return name + unit + choices


def _releases(key: Key) -> str:
    exists = key.get("exists")
    if not exists:
        return ""
    return "no release" if "<0" in exists.values() else _range(exists)


def _range(versions: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name.replace('megatron-core', 'core')} {specifier}" for name, specifier in versions.items()
    )


def _note(key: Key) -> str:
    parts = ["recipe"] if key.get("recipe_sets") else []
    return "; ".join([*parts, key["note"]] if "note" in key else parts)
