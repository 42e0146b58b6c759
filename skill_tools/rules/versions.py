# SPDX-License-Identifier: Apache-2.0
"""Releases: the user's, a rule's, and their comparison.

Facts about releases are in `knowledge/releases.yaml`. `packaging` is imported only when a version is
compared, because most lints state none and its import would double their time.
"""

import operator
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from skill_tools import knowledge
from skill_tools.configs.releases import CHECKOUT
from skill_tools.errors import UnusableInput

Versions = Mapping[str, str]
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
_CLAUSE = re.compile(r"(>=|<=|==|<|>)\s*([^*=]+)")  # not the wildcards and the rarer operators of PEP 440


class Standing(Enum):
    """How a rule's releases stand to the user's: it applies, it does not, or nobody said."""

    APPLIES = "applies"
    ABSENT = "absent"
    OPEN = "open"


def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = knowledge.index()["releases"]
    return facts


def canonical_name(name: str) -> str:
    """Return a distribution's name as the rules write it: `Megatron_Core` is `megatron-core`."""
    normal = re.sub(r"[-_.]+", "-", name.strip()).lower()
    alias: str = _facts()["aliases"].get(normal, normal)
    return alias


def parse_target(text: str) -> tuple[str, str]:
    """Read one `--target NAME==VERSION`; `main` stands for a framework's unreleased main branch."""
    name, equals, version = text.partition("==")
    if not (name.strip() and equals and version.strip()):
        raise UnusableInput(
            f"--target {text!r} is not a release",
            expected="NAME==VERSION",
            attempt="--target megatron-core==0.16.1",
        )
    return canonical_name(name), _checked(canonical_name(name), version.strip())


def read_versions_text(text: str) -> dict[str, str]:
    """Read the output of `pip list` or `pip freeze`; lines of any other shape are skipped."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"^\s*([A-Za-z0-9][\w.-]*)\s*(?:==|\s)\s*v?(\d[\w.+!-]*)\s*(?:$|[;#\s])", line)
        if match and is_version(match[2]):
            found.setdefault(canonical_name(match[1]), match[2])
    return found


def resolve(*stated: Versions) -> dict[str, str]:
    """Merge statements, a later one wins, and add implied ones (a Bridge release pins megatron-core)."""
    versions = {
        canonical_name(name): version
        for mapping in stated
        for name, version in mapping.items()
        if is_version(version)
    }
    for package, implied in _facts()["implies"].items() if versions else ():
        release = versions.get(package, "")
        series = ".".join(release.split(".")[:2])
        for other, pinned in implied.items():
            if other not in versions and (found := pinned.get(release, pinned.get(series))):
                versions[other] = found
    return versions


def standing(
    wanted: Versions, versions: Versions, *, conditional: Versions | None = None, framework: str = ""
) -> tuple[Standing, tuple[str, ...]]:
    """Compare a rule's specifiers with the user's releases.

    Returns the standing and, when it is open, its condition, such as `megatron-core>=0.18`. One package
    outside its range is enough for `ABSENT`. Specifiers outside `conditional` (by default all are in it) hold in every
    known release. They count only against a stated release, or a build that is no release. `framework` as in
    `in_range`.
    """
    conditional = wanted if conditional is None else conditional
    if not conditional:
        if not versions:
            return Standing.APPLIES, ()
        if displaced(wanted, versions):
            return Standing.ABSENT, ()
    open_ends = []
    for package, specifier in wanted.items():
        if package not in conditional and package not in versions:
            continue
        answer = in_range(package, specifier, versions, framework)
        if answer is Standing.ABSENT:
            return Standing.ABSENT, ()
        if answer is Standing.OPEN:
            open_ends.append(f"{package}{specifier}")
    return (Standing.OPEN if open_ends else Standing.APPLIES), tuple(open_ends)


def in_range(package: str, specifier: str, versions: Versions, framework: str = "") -> Standing:
    """Say whether the user's release of `package` is in the range that `specifier` describes.

    An unstated release is one that `framework` runs with; a checkout may be past its stated one.
    """
    stated = versions.get(package)
    meant = _running_with(framework, package) if stated is None else _meant(package, stated)
    possible = {admits(specifier, version) for version in meant}
    if len(possible) == 1:
        return Standing.APPLIES if possible.pop() else Standing.ABSENT
    replaced = _facts()["replaces"].get(package)
    return Standing.ABSENT if replaced in versions else Standing.OPEN


@cache
def _meant(package: str, stated: str) -> tuple[str, ...]:
    """Return the possible releases of a statement: for a checkout also the next known one, or the one before.

    The successor of a release from before the known ones is not known.
    """
    if not stated.endswith(CHECKOUT):
        return (stated,)
    from packaging.version import Version

    release = Version(stated)
    known = sorted(_facts()["known"][package], key=Version)
    base = Version(release.base_version)
    before = [each for each in known if Version(each) < base]
    after = [each for each in known if Version(each) > base] if before else []
    return (stated, *(before[-1:] if release.is_prerelease else after[:1]))


def _running_with(framework: str, package: str) -> list[str]:
    """Return the known releases of `package` that `framework` runs with; none if it does not name the package."""
    range_ = _facts()["runs_with"].get(framework, {}).get(package)
    return [version for version in _facts()["known"][package] if admits(range_, version)] if range_ else []


def unstated_branch(wanted: Versions, versions: Versions) -> str | None:
    """Return the unstated development branch that a rule is only about; a release is likelier."""
    branches = _facts()["replaces"]
    return next((package for package in wanted if package in branches and package not in versions), None)


def holds_today(wanted: Versions, facts: Mapping[str, Any] | None = None) -> bool:
    """Return whether the newest known releases are among a rule's; `facts` as in `conditional`."""
    known = (facts or _facts())["known"]
    newest = {
        package: next((each for each in reversed(known.get(package, ())) if "dev" not in each), None)
        for package in wanted
    }
    return all(newest[package] is None or admits(wanted[package], newest[package]) for package in wanted)


def displaced(wanted: Versions, versions: Versions) -> bool:
    """Return whether a stated build takes the place of a package in `wanted`, as a development branch does."""
    return any(build in versions and package in wanted for build, package in _facts()["replaces"].items())


def conditional(
    wanted: Versions, facts: Mapping[str, Any] | None = None, *, lives: Iterable[Versions] = ()
) -> dict[str, str]:
    """Return the specifiers that some known release does not satisfy; the others hold whatever is installed.

    `facts` is the content of `releases.yaml`, for the compiler, which has no index yet. `lives` are the releases
    of keys that have to be set: whoever sets such a key runs one of them, so the others do not count.
    """
    known = (facts or _facts())["known"]
    lives = tuple(lives)
    found = {}
    for package, specifier in wanted.items():
        within = [life[package] for life in lives if package in life]
        possible = [
            version for version in known.get(package, ()) if all(admits(each, version) for each in within)
        ]
        if not possible or not all(admits(specifier, version) for version in possible):
            found[package] = specifier
    return found


@cache
def admits(specifier: str, version: str) -> bool:
    """Return whether `specifier` admits `version`; a pre-release counts as the release that it leads to."""
    from packaging.version import Version

    release = Version(Version(version).base_version)
    clauses = [_CLAUSE.fullmatch(clause.strip()) for clause in specifier.split(",")]
    if all(clauses):
        # The import of packaging.specifiers costs as much as a whole lint.
        return all(_COMPARISONS[found[1]](release, Version(found[2])) for found in clauses if found)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(release, prereleases=True)


@cache
def is_version(text: str) -> bool:
    """Return whether `text` is a version at all."""
    from packaging.version import Version

    try:
        Version(text)
    except ValueError:  # InvalidVersion is one, and so is Python's error for a number of too many digits
        return False
    return True


def _checked(name: str, version: str) -> str:
    version = _facts()["main"].get(name, version) if version == "main" else version
    if not is_version(version):
        raise UnusableInput(
            f"--target {name}=={version} names no version",
            expected="a version such as 0.16.1",
            attempt=f"--target {name}==main or a released version",
        )
    return version


def read_targets(targets: Iterable[str]) -> dict[str, str]:
    """Read every `--target` of a command line."""
    return dict(parse_target(target) for target in targets)
