# SPDX-License-Identifier: Apache-2.0
"""Releases stated in texts: a configuration's comments and install lines, and files with pinned packages beside it.

Only an exact release counts, and only of a distribution that the rules know. A comment such as `# since axolotl 0.18`
says nothing about installed releases.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from skill_tools import knowledge
from skill_tools.configs.files import read_bytes
from skill_tools.errors import UnusableInput

CHECKOUT = (
    "+checkout"  # as the local part of a release, PEP 440: of a source tree, at that release or after it
)
_MOST_BYTES = 4 * 1024 * 1024
_MOST_FILES = 20
_MOST_LEVELS = 6
_ROOT_MARKS = (".git", "pyproject.toml", "setup.py")
_OF_PROJECT = (
    "requirements",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "uv.lock",
    "poetry.lock",
    "pdm.lock",
    "pylock.toml",
)
_BESIDE = (*_OF_PROJECT, "constraints", "dockerfile", "containerfile", "docker-compose", "compose.")
# In a comment, these words before a release say that another one is installed, and only these may follow one.
_NOT_AFTER = frozenset(
    ["since", "from", "before", "until", "after", "below", "than", "least", "most", "to", "not", "needs"]
)
_MAY_FOLLOW = frozenset(
    ["on", "with", "in", "image", "container", "release", "run", "build", "wheel", "(main)"]
)


class Stated(NamedTuple):
    """A release, and where it is stated, in words."""

    version: str
    where: str


def is_before(release: str, bound: str) -> bool:
    """Return whether `release` comes before `bound`, by the numbers of both (`0.13.2`, `0.15`)."""
    return _numbers(release) < _numbers(bound)


def _numbers(release: str) -> list[int]:
    found = re.match(r"\d+(?:\.\d+)*", release)
    return [int(part) for part in found[0].split(".")] if found else []


def stated_in(text: str, file: str = "") -> dict[str, Stated]:
    """Return the releases that `text` states, by distribution; of several statements of one file the last counts.

    It is `NAME==1.2.3` anywhere, `NAME 1.2.3` in a comment, an entry of a lock file, or the tag of a known image.
    """
    found = {name: (version, at) for name, version, at in _statements(text)}
    prefix = f"{file} line" if file else "line"
    return {
        name: Stated(version, f"{prefix} {text.count(chr(10), 0, at) + 1}")
        for name, (version, at) in found.items()
    }


def stated_beside(folder: str) -> dict[str, Stated]:
    """Return the releases that requirements, lock files, Dockerfiles and compose files for `folder` agree on.

    These files lie in it. Other packages are looked up in the root of its project, among the project's own
    dependencies.
    """
    root = _root_of(folder)
    beside = _stated_by_files(folder, _BESIDE)
    if root is None:
        return beside
    return {
        **_stated_by_files(root, _OF_PROJECT, f"{os.path.relpath(root, folder or '.')}{os.sep}"),
        **beside,
    }


def _root_of(folder: str) -> str | None:
    """Return the nearest folder above `folder` that is a project's root by its files; none if it is one itself."""
    level = os.path.abspath(folder)
    for depth in range(_MOST_LEVELS):
        if any(os.path.exists(os.path.join(level, mark)) for mark in _ROOT_MARKS):
            return level if depth else None
        level = os.path.dirname(level)
    return None


def _stated_by_files(folder: str, beginnings: tuple[str, ...], prefix: str = "") -> dict[str, Stated]:
    """Return the releases that no two statements in the files of `folder` with such names differ on."""
    found: dict[str, Stated] = {}
    torn: set[str] = set()
    for name in _pinning_files(folder, beginnings):
        try:
            data = read_bytes(os.path.join(folder, name), _MOST_BYTES, expected="a text file")
        except UnusableInput:
            continue
        text = data.decode("utf-8", "replace")
        for package, version, at in (*_statements(text), *_own(text, folder)):
            stated = Stated(version, f"{prefix}{name} line {text.count(chr(10), 0, at) + 1}")
            if found.setdefault(package, stated).version != version:
                torn.add(package)
    return {name: each for name, each in found.items() if name not in torn}


def _own(text: str, folder: str) -> Iterator[tuple[str, str, int]]:
    """Yield the release of a framework's checkout, where `text` is its pyproject.toml or setup.py.

    It is marked as a checkout's: its code may be newer than that release.
    """
    project = re.search(r"^\[project\]\n(?:[^\[\n][^\n]*\n|\n)*", text, re.MULTILINE)
    for found in _pattern(r"^name ?= ?[\"']NAME[\"']").finditer(project[0] if project else ""):
        file = re.search(r"^version ?= ?\{ ?file ?= ?[\"']([\w/-]+)[\"'] ?\}", text, re.MULTILINE)
        number = _pattern(r"^version ?= ?[\"']NUMBER[\"']").search(project[0] if project else "")
        if number is not None:
            yield _named(found), f"{number['version']}{CHECKOUT}", text.index(number[0])
        elif file is not None:
            with suppress(UnusableInput):
                data = read_bytes(os.path.join(folder, file[1]), _MOST_BYTES, expected="a release")
                if held := re.match(r"\d+\.\d[\w.]*\w", data.decode("utf-8", "replace")):
                    yield _named(found), f"{held[0]}{CHECKOUT}", file.start()
    if "setup(" in text:
        form = _pattern(r"\bname ?= ?[\"']NAME[\"'],\s+version ?= ?[\"']NUMBER[\"']")
        yield from (
            (_named(found), f"{found['version']}{CHECKOUT}", found.start()) for found in form.finditer(text)
        )


def _pinning_files(folder: str, beginnings: tuple[str, ...]) -> list[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return []
    pinning = (name for name in names if name.lower().startswith(beginnings))
    return sorted(pinning)[:_MOST_FILES]


def _statements(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield distribution, release and offset of each statement, form by form."""
    if "#" in text:
        yield from _in_comments(text)
    if "==" in text:
        yield from _found(_pattern(r"(?<![\w.-])NAME(?:\[[\w,-]*\])?==(?!=)NUMBER"), text)
    if 'version = "' in text:
        yield from _found(_pattern(r'\]\]\s+name = "NAME"\s+version = "NUMBER"'), text)
    for image, held in knowledge.index()["releases"]["images"].items():
        if image in text:
            for found in re.finditer(rf"\b{re.escape(image)}:(\S+)", text):
                yield from ((name, version, found.start()) for name, version in _in_image(held, found[1]))


def _found(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, str, int]]:
    for found in pattern.finditer(text):
        yield _named(found), found["version"].rstrip("."), found.start("name")


def _named(found: re.Match[str]) -> str:
    return re.sub("[_ ]", "-", found["name"].lower())


def _in_comments(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield releases that comments state: `# axolotl 0.18`, not `# since axolotl 0.18` or `# axolotl 0.18 or newer`."""
    pattern = _pattern(r"(?<![\w./-])NAME[ :]+NUMBER")
    for comment in re.finditer(r"#[^\n]*", text):
        for name, version, at in _found(pattern, comment[0]):
            before = comment[0][1:at].lower().split()[-1:]
            rest = comment[0][at:].partition(version)[2]
            ends = rest.lstrip()[:1] in ",;.)/" or _MAY_FOLLOW.issuperset(rest.lower().split()[:1])
            if ends and _NOT_AFTER.isdisjoint(before):
                yield name, version, comment.start() + at


def _in_image(held: Mapping[str, Any], tag: str) -> Iterator[tuple[str, str]]:
    """Yield the releases in an image with this `tag`, as far as the tag says; `held` are known facts of the image."""
    release = re.match(r"(?:main-)?v?(\d+\.\d+(?:\.\d+)*)", tag)
    if release is None:
        return
    if "tag" in held:
        yield held["tag"], release[1]
    else:
        yield from held.get(".".join(release[1].split(".")[:2]), {}).items()


@knowledge.derived
def _pattern(form: str) -> re.Pattern[str]:
    """Return the pattern of a form of statement, in which NAME stands for a distribution and NUMBER for its release."""
    names = "|".join(name.replace("-", "[-_ ]") for name in knowledge.index()["releases"]["known"])
    number = r"v?(?P<version>\d+\.\d[\w.!]*(?:\+[\w.]+)?)"
    form = form.replace("NAME", f"(?P<name>{names})").replace("NUMBER", number)
    return re.compile(form, re.IGNORECASE | re.MULTILINE)
