# SPDX-License-Identifier: Apache-2.0
"""An input: its text, which is parsed once, and its kind."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from skill_tools.configs.files import MAX_BYTES, find_file, read_text
from skill_tools.errors import UnusableInput

if TYPE_CHECKING:
    import ast

    from skill_tools.configs.shell.command import Command
    from skill_tools.configs.yaml_lines import Documents, Node

_SUFFIXES = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".py": "python",
    ".sh": "shell", ".bash": "shell", ".slurm": "shell", ".sbatch": "shell", ".sub": "shell",
}  # fmt: skip
_STRING_OR_COMMENT = r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*[\s\S]*?\*/'  # compiled when a text has either
_PYTHON = re.compile(r"^(?:from [\w.]+ import |import \w|def \w+\(|class \w+|@\w)", re.MULTILINE)
_SHELL = re.compile(r"^#!.*sh\b|(?:^|\s)--?[a-z][\w-]*(?:[\s=]|$)|^\s*(?:export )?[A-Z_]+=|\\$", re.MULTILINE)
_YAML = re.compile(r"^(?:- |[\w\"'.-]+\s*:(?:\s|$))", re.MULTILINE)
_TOML = re.compile(r"(?:\s|#.*\n)*\[\[?[\w.\"-]+\]\]?[ \t]*(?:#.*)?\n")
_SOURCES = r"(?m)^[ \t]*(?:source|\.)[ \t]"  # compiled when there is a script
_DOTTED = re.compile(r"^\s*[+~]*[a-z_]+(?:\.\w+)+=")


class Kind(Enum):
    """The format of an input."""

    YAML = "yaml"
    JSON = "json"
    TOML = "toml"
    PYTHON = "python"
    SHELL = "shell"

    @property
    def label(self) -> str:
        """Its name in an answer."""
        return {"python": "Python", "shell": "a shell script"}.get(self.value, self.value.upper())


class Source:
    """One input: `name` as the user gave it, its text, and the folder that its relative paths start from.

    `recipe` is the function of a Python file that was asked for with `file.py::function`. A source does not change, so
    it is parsed once, when somebody first asks for its documents; so is a file that many others name (`_Parsed`).
    """

    _stated: Callable[[], Mapping[str, str]] = dict

    def __init__(self, name: str, text: str, folder: Path | None = None, recipe: str | None = None) -> None:
        self.name, self.text, self.folder, self.recipe = name, text, folder, recipe

    def with_text(self, text: str) -> "Source":
        """Return the same input with another text."""
        return self._like(text, self.recipe)

    def stating(self, releases: Callable[[], Mapping[str, str]]) -> "Source":
        """Return the same input; `releases` tells, when first asked, those of the user or of the input's folder."""
        source = self._like(self.text, self.recipe)
        source._stated = releases
        return source

    def release(self, package: str) -> str | None:
        """Return the release of a distribution that is stated for this input, by the user, its folder or its text."""
        from skill_tools.configs.releases import stated_in

        in_text = stated_in(self.text).get(package)
        return self._stated().get(package) or (in_text.version if in_text is not None else None)

    def _like(self, text: str, recipe: str | None) -> "Source":
        source = Source(self.name, text, self.folder, recipe)
        source._stated = self._stated
        return source

    @property
    def title(self) -> str:
        """The input's name in an answer: its name, and the recipe in it."""
        return f"{self.name}::{self.recipe}" if self.recipe else self.name

    def refused(self, *, expected: str, attempt: str) -> UnusableInput:
        """Return the error of a dialect that reads no input of this kind."""
        return UnusableInput(f"{self.name}:1 is {self.kind.label}", expected=expected, attempt=attempt)

    def for_recipe(self, recipe: str) -> "Source":
        """Return the same input for one recipe in it."""
        source = self._like(self.text, recipe)
        source.__dict__["module"] = self.module
        return source

    def part(self, documents: "list[Node]") -> "Source":
        """Return the same input as if it held `documents` alone, which are parts of it."""
        from skill_tools.configs.yaml_lines import Documents

        source = self._like(self.text, None)
        source.__dict__["documents"] = Documents(documents)
        return source

    def part_as_shell(self, text: str) -> "Source":
        """Return a shell text that stands in this input, under its name."""
        source = self._like(text, None)
        source.__dict__["kind"] = Kind.SHELL
        return source

    @cached_property
    def documents(self) -> "Documents":
        """The roots of a YAML, JSON or TOML text, not to be changed; raises `UnusableInput` where it is none."""
        pyyaml = self.release("pyyaml") if "<<" in self.text and self.kind is Kind.YAML else None
        return self.documents_of(pyyaml)

    def documents_of(self, pyyaml: str | None) -> "Documents":
        """Return them as a release of PyYAML reads them, None where it is unknown."""
        return _PARSED.documents(self.kind, self.text, self.name, pyyaml)

    @cached_property
    def module(self) -> "ast.Module":
        """The tree of a Python text; raises `UnusableInput` where it is none."""
        from skill_tools.configs.python.syntax import parse

        return parse(self.text, self.name)

    @cached_property
    def script(self) -> str:
        """The text of a shell script, with those of the files beside it that it sources."""
        if not re.search(_SOURCES, self.text):
            return self.text
        from skill_tools.configs.shell.script import text_with_sourced

        return text_with_sourced(self.text, self.folder)

    @cached_property
    def commands(self) -> "list[Command]":
        """The commands of a shell script, in order, and last its variables alone (`shell.script.run`)."""
        from skill_tools.configs.shell.script import run

        return run(self.text, name=self.name, folder=self.folder)

    @cached_property
    def kind(self) -> Kind:
        """The kind of the text: by the file's suffix, else by its first impression."""
        suffix = _SUFFIXES.get(Path(self.name).suffix.lower())
        return Kind(suffix) if suffix else _impression(self.text)


class _Parsed:
    """The documents of the texts that were parsed last: bases and DeepSpeed files are named by many configurations."""

    def __init__(self, most_characters: int) -> None:
        self._free_characters = most_characters
        self._kept: dict[tuple[Kind, str | None, str], Documents] = {}

    def documents(self, kind: Kind, text: str, name: str, pyyaml: str | None) -> "Documents":
        """Return the roots of `text`, as the release `pyyaml` reads it; the ones asked for longest ago make room."""
        found = self._kept.pop((kind, pyyaml, text), None)
        if found is None:
            found = _parse(kind, text, name, pyyaml)
            self._free_characters -= len(text)
        self._kept[kind, pyyaml, text] = found
        while self._free_characters < 0:
            _, _, oldest = oldest_key = next(iter(self._kept))
            del self._kept[oldest_key]
            self._free_characters += len(oldest)
        return found


_PARSED = _Parsed(2 * MAX_BYTES)


_WRITTEN: ContextVar[Mapping[str, Source]] = ContextVar(
    "files that scripts write", default=MappingProxyType({})
)


def _parse(kind: Kind, text: str, name: str, pyyaml: str | None) -> "Documents":
    if kind is Kind.TOML:
        from skill_tools.configs.toml_lines import parse as parse_toml

        return parse_toml(text, name)
    if kind is Kind.JSON:
        from skill_tools.configs import json_lines

        with suppress(json_lines.NotJsonError):
            return json_lines.parse(text, name)
    from skill_tools.configs import yaml_events

    if kind is Kind.JSON:
        try:
            return yaml_events.parse(_without_comments(text), name)
        except UnusableInput as error:
            raise _not_json(text, name) or error from None
    if pyyaml is None:
        return yaml_events.parse(text, name)
    from skill_tools.configs.releases import is_before

    wins = not is_before(pyyaml, yaml_events.MERGE_ORDER_CHANGED)
    return yaml_events.parse(text, name, last_merge_wins=wins)


def _not_json(text: str, name: str) -> UnusableInput | None:
    """Return the error of Python's own JSON parser; None if `text` is JSON."""
    import json

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return UnusableInput(
            f"{name}:{error.lineno}:{error.colno} is not valid JSON ({error.msg})",
            expected="JSON",
            attempt="mending that line",
        )
    except (ValueError, RecursionError):
        pass
    return None


def _without_comments(text: str) -> str:
    """Return JSON with blanks for tabs and for the comments that some readers allow, each character in its place."""
    if "//" in text or "/*" in text:
        text = re.sub(_STRING_OR_COMMENT, lambda found: found[0] if found[1] else _blank(found[0]), text)
    return text.replace("\t", " ")


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def load(path: str | Path) -> Source:
    """Read one file; `file.py::function` names one recipe in it.

    Raises `UnusableInput` when the file is missing, too large, or not text in UTF-8.
    """
    name, _, recipe = str(path).partition("::")
    return Source(name, read_text(name), Path(name).parent, recipe or None)


def only_script(
    sources: Sequence[Source], overrides: Sequence[str], reader: str, expected: str, *, one: str = "script"
) -> Source:
    """Return the one Python file that `reader` is read from; raises `UnusableInput` for anything else."""
    if len(sources) != 1 or sources[0].kind is not Kind.PYTHON or overrides:
        raise UnusableInput(
            f"{', '.join(source.name for source in sources) or 'overrides'}: {reader} is read from one Python {one}",
            expected=f"the {one} {expected}",
            attempt=f"that {one} alone, without --overrides and --compose",
        )
    return sources[0]


def find(path: str, folders: Iterable[Path]) -> Source | None:
    """Return the file at `path`, seen from one of `folders` or from the working folder; None if it is not there.

    A file of its name that was given with the one that names it stands for it: the run's folders are elsewhere.
    """
    files = _WRITTEN.get()
    written = files.get(os.path.normpath(path))
    if written is not None:
        return written
    found = find_file(path, folders)
    return files.get(f"*/{Path(path).name}") if found is None else load(found)


@contextmanager
def with_files(files: Mapping[str, Source]) -> Iterator[None]:
    """Let `find` return `files`, by their normalised paths, before any on the disk."""
    token = _WRITTEN.set(files)
    try:
        yield
    finally:
        _WRITTEN.reset(token)


def looks_like_configuration(path: str) -> bool:
    """Return whether `path`, by its suffix alone, names a configuration rather than a log or a setting."""
    return Path(path.partition("::")[0]).suffix.lower() in _SUFFIXES


def _impression(text: str) -> Kind:
    start = text.lstrip()
    if start.startswith("{"):
        return Kind.JSON
    first = start.splitlines()[0] if start else ""
    if first.startswith("#!") and "sh" in first:
        return Kind.SHELL
    if _TOML.match(text):
        return Kind.TOML
    if _PYTHON.search(text):
        return Kind.PYTHON
    is_shell = _SHELL.search(text) or _DOTTED.match(text)
    return Kind.SHELL if is_shell and not _YAML.search(text) else Kind.YAML
