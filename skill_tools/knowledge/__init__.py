# SPDX-License-Identifier: Apache-2.0
"""The facts, as data, and the loader of their compiled form.

People write YAML; the commands load the JSON in `index/`, because parsing the YAML would cost more than the
lint or the plan itself. `rules/index.py` writes it. `add` registers the folder of a framework that is not ours. Nothing
here interprets a fact.

- key: a setting under its canonical name (`keys.yaml`, `keys/*.yaml`), with each framework's spelling, type and default
- vocabulary: every name that a framework accepts (`vocabulary/NAME.txt`), to detect misspelt ones
- rule: one fact about configurations (`rules/*.yaml`); docs/design.md describes its fields
- index: all of it as JSON, each file named for its sections: those that one command reads share one. A lint reads
  the rules of one framework, so rules have a file for each group of frameworks (`index/rules/axolotl.json`), or for
  several small ones. The rules' examples, which no lint needs, are in `examples.json`
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from skill_tools.bundle import knowledge_path

P = ParamSpec("P")
T = TypeVar("T")

# Signs of a folded name: "#" for no letter that falls away to "Z" for 55; none is the bracket that begins a section.
_NONE_FALLS, _MOST_FALL = ord("#"), ord("Z") - ord("#")
_WHOLE = "!"
_added: list[Path] = []
_kept: list[Callable[[], None]] = []
INPUT = "input"  # the `check` of rules about the input itself, whatever the framework
_MERGED = ("spelling", "aliases", "default", "exists")  # a key's fields by framework


def derived(make: Callable[P, T]) -> Callable[P, T]:
    """Let `make` work once and remember its result of the index, until the facts change."""
    kept = cache(make)
    _kept.append(kept.cache_clear)
    return cast("Callable[P, T]", kept)


def forget() -> None:
    """Forget all that was loaded and made of the facts, because they have changed."""
    for clear in _kept:
        clear()


def load_yaml(*parts: str) -> Any:
    """Return one YAML file of this folder as plain data."""
    return load_yaml_file(knowledge_path(*parts))


def load_yaml_file(path: Path) -> Any:
    """Return a YAML file as plain data."""
    return parsed_yaml(path.read_text(encoding="utf-8"))


def parsed_yaml(text: str) -> Any:
    """Return a YAML text as plain data; libyaml, where PyYAML has it, is ten times faster."""
    import yaml

    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def load_keys() -> list[dict[str, Any]]:
    """Return the entries of `keys.yaml`, then those of the files in `keys/`, as plain data; one entry a key."""
    paths = [knowledge_path("keys.yaml"), *sorted(knowledge_path("keys").glob("*.yaml"))]
    return _merged(entry for path in paths for entry in load_yaml_file(path))


def load_messages() -> list[dict[str, Any]]:
    """Return the entries of the files in `messages/` as plain data."""
    paths = sorted(knowledge_path("messages").glob("*.yaml"))
    return [entry for path in paths for entry in load_yaml_file(path)]


def load_fixes() -> list[dict[str, Any]]:
    """Return the entries of the files in `fixes/` as plain data."""
    paths = sorted(knowledge_path("fixes").glob("*.yaml"))
    return [entry for path in paths for entry in load_yaml_file(path)]


def words(text: str) -> list[str]:
    """Return the names in a vocabulary file, one a line; blank lines and comments name nothing."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def folded(names: Iterable[str]) -> str:
    """Return names in half of the room, a line each: a sign says how many letters of the one before fall away.

    Not how many stay: sections of one form under names of different length then have the same lines, which a zip
    compresses to nothing. A name that keeps nothing begins with `_WHOLE`. A flag has its words joined by underscores,
    as keys of other frameworks have the same ones.
    """
    lines, before = [], ""
    for name in map(_underscored, names):
        pairs = enumerate(zip(before, name, strict=False))
        shared = next((at for at, (old, new) in pairs if old != new), min(len(before), len(name)))
        fall = len(before) - shared
        lines.append(f"{chr(_NONE_FALLS + fall)}{name[shared:]}" if fall <= _MOST_FALL else _WHOLE + name)
        before = name
    return "\n".join(lines)


def _underscored(name: str) -> str:
    """Return a flag such as `--a-b` as `-a_b`, and any other name as it is; none of those begins with one dash."""
    is_dashed = name.startswith("--") and "-" in name[2:] and "_" not in name
    return f"-{name[2:].replace('-', '_')}" if is_dashed else name


def _dashed(name: str) -> str:
    """Return the flag that `_underscored` was given."""
    return name if name[1] == "-" else f"-{name.replace('_', '-')}"


def names(vocabulary: str) -> tuple[str, ...]:
    """Return the names in a vocabulary of the index, sorted; none where there is no such file."""
    found, before = [], ""
    for line in index()["vocabulary"].get(vocabulary, "").splitlines():
        kept = 0 if line[0] == _WHOLE else len(before) - ord(line[0]) + _NONE_FALLS
        before = before[:kept] + line[1:]
        found.append(_dashed(before) if before[0] == "-" else before)
    return tuple(found)


class Index(dict[str, Any]):
    """The sections of the index by name, each read when it is first asked for: a lint needs no models.

    `rules` are the entries of all rules by id, `vocabulary` the folded text of each vocabulary by its name.
    """

    def __missing__(self, section: str) -> Any:
        found = _read_for(section)
        for name, content in found.items():
            self.setdefault(name, content)
        return found[section]

    def rules_about(self, dialects: Collection[str]) -> list[dict[str, Any]]:
        """Return the entries of the rules about any of `dialects` and of those about the input itself, by id."""
        if "rules" in self:
            return [rule for rule in self["rules"] if _is_about(rule, dialects)]
        about = {INPUT, *dialects}
        paths = [path for path in _rule_files() if not about.isdisjoint(path.stem.split("+"))]
        return [rule for rule in _by_id(paths) if _is_about(rule, dialects)]


def _read_for(section: str) -> dict[str, Any]:
    """Return a section by its name, with those that are in the same file."""
    match section:
        case "rules":
            return {section: _by_id(_rule_files())}
        case "vocabulary":
            # A line of a name begins with a sign, so no other line does with a bracket.
            text = knowledge_path("index", "vocabulary.txt").read_text(encoding="ascii")
            parts = (part.partition("]\n") for part in f"\n{text}".split("\n[")[1:])
            return {section: {name: folded.rstrip("\n") for name, _, folded in parts}}
    paths = knowledge_path("index").iterdir()
    found: dict[str, Any] = _decoded(next(path for path in paths if section in path.stem.split("+")))
    return found


def _rule_files() -> list[Path]:
    return sorted(knowledge_path("index", "rules").iterdir())


def _by_id(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rules in `paths`, in one order however they are spread over files."""
    return sorted((rule for path in paths for rule in _decoded(path)), key=lambda rule: str(rule["id"]))


def _decoded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="ascii"))


def group_of(rule: Mapping[str, Any]) -> str:
    """Return the subject of a rule: its frameworks, or the input itself."""
    return INPUT if rule.get("check") == INPUT else "+".join(rule["dialects"])


def _is_about(rule: Mapping[str, Any], dialects: Collection[str]) -> bool:
    return rule.get("check") == INPUT or not set(dialects).isdisjoint(rule["dialects"])


@derived
def index() -> Index:
    """Return the index, whose sections are as in their sources."""
    loaded = Index()
    for folder in _added:
        loaded |= _joined(loaded, folder)
    return loaded


@derived
def examples() -> dict[str, Any]:
    """Return `examples.json`: each rule's examples by its id, which `explain` shows and no lint needs."""
    found: dict[str, Any] = json.loads(knowledge_path("examples.json").read_text(encoding="utf-8"))
    return found


def add(folder: Path) -> None:
    """Join the facts in `folder`: `keys.yaml`, `vocabulary/*.txt` and `rules/*.yaml`, in the form of this folder's.

    An entry of a key that exists already has the framework's part: spelling, aliases, type, default.
    """
    _added.append(folder)
    forget()


def remove(folder: Path) -> None:
    """Take the facts in `folder` out again."""
    _added.remove(folder)
    forget()


def _merged(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join entries of one key: the first defines the key, a later one has the part of one more framework."""
    keys: dict[str, dict[str, Any]] = {}
    for entry in entries:
        old = keys.get(entry["key"], {})
        both = {part: {**old.get(part, {}), **entry[part]} for part in _MERGED if part in entry}
        if old and isinstance(entry.get("type"), dict):
            types = old["type"]
            both["type"] = {**(types if isinstance(types, dict) else {"default": types}), **entry["type"]}
        keys[entry["key"]] = {**entry, **old, **both}
    return list(keys.values())


def _joined(known: dict[str, Any], folder: Path) -> dict[str, Any]:
    keys = _merged([*known["keys"], *load_yaml_file(folder / "keys.yaml")])
    added = [rule for path in sorted(folder.glob("rules/*.yaml")) for rule in load_yaml_file(path)]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("vocabulary/*.txt")}
    return {
        "keys": keys,
        "rules": sorted([*known["rules"], *added], key=lambda rule: str(rule["id"])),
        "vocabulary": known["vocabulary"] | {name: folded(words(text)) for name, text in texts.items()},
    }
