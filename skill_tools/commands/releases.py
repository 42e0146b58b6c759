# SPDX-License-Identifier: Apache-2.0
"""Reads the releases on a command line, `--target` and `--versions`, and decides which of all stated ones apply."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.configs.releases import Stated, stated_beside, stated_in
from skill_tools.configs.source import load
from skill_tools.errors import UnusableInput
from skill_tools.nearest import nearest
from skill_tools.rules.knowledge import rules_about
from skill_tools.rules.versions import read_targets, read_versions_text


class ShowKnown(argparse.Action):
    """`--version`: prints the newest release of each framework known to the rules, and the date of that comparison."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and end the process."""
        print(_newest_of_all())
        parser.exit()


def _newest_of_all() -> str:
    from skill_tools import __version__

    releases = knowledge.index()["releases"]
    newest = sorted(f"{name} {versions[-1]}" for name, versions in releases["known"].items())
    return f"offload {__version__}, releases compared on {releases['compared']}: {', '.join(newest)}"


def stated_by_user(args: argparse.Namespace) -> dict[str, Stated]:
    """Return the stated releases by distribution, with the option of each; `--target` wins over `--versions`."""
    listed: dict[str, str] = {}
    if args.versions:
        listed = read_versions_text(load(args.versions).text)
        if not listed:
            raise UnusableInput(
                f"{args.versions} lists no package",
                expected="the output of pip list or pip freeze",
                attempt="pip freeze",
            )
    targets = read_targets(args.target)
    return {
        **{name: Stated(version, str(args.versions)) for name, version in listed.items()},
        **{name: Stated(version, "--target") for name, version in targets.items()},
    }


def of_input(config: Config, beside: Mapping[str, Stated], first: str) -> dict[str, Stated]:
    """Return the releases stated in the input (its first file is `first`), else those stated `beside` it."""
    found = dict(beside)
    if config.versions:
        for name, text in config.sources.items():
            found |= stated_in(text, "" if name == first else name)
    return found


def of_run(args: argparse.Namespace, config: Config, files: Sequence[str]) -> dict[str, Stated]:
    """Return the releases of a run of `files`: the user's word goes before the input's, that before its folder's."""
    beside = stated_beside(os.path.dirname(files[0])) if files and files[0] != "-" else {}
    found = of_input(config, beside, files[0]) if files else {}
    return {**found, **stated_by_user(args)}


def that_matter(found: Mapping[str, Stated], config: Config) -> dict[str, Stated]:
    """Return those of the `found` releases that any rule about `config` asks for."""
    if not found:
        return {}
    rules = rules_about(config.dialects().union(config.shares))
    asked = {package for rule in rules for package in rule.versions}
    return {name: each for name, each in found.items() if name in asked}


@knowledge.derived
def newest_known(dialects: frozenset[str], about: frozenset[str]) -> dict[str, str]:
    """Return how far the rules about each of `dialects` go: its distribution's newest release that they know.

    A dialect's distribution is the one of most of its rules. `about` are the dialects whose rules are loaded.
    """
    known = _known()
    asked: dict[str, Counter[str]] = {dialect: Counter() for dialect in sorted(dialects)}
    for rule in rules_about(about):
        for dialect in dialects.intersection(rule.dialects):
            asked[dialect].update(name for name in rule.versions if known[name])
    names = [max(counter, key=counter.__getitem__) for counter in asked.values() if counter]
    return {name: next(each for each in reversed(known[name]) if "dev" not in each) for name in names}


def check(targets: Iterable[str]) -> None:
    """Raise `UnusableInput` for a distribution that no rule knows; warn on stderr of a release later than all known."""
    for name, version in read_targets(targets).items():
        if name not in _known():
            raise _unknown(name)
        _warn_of_later(name, version)


def _unknown(name: str) -> UnusableInput:
    """Return the message about a name that, as a typo, would weaken findings silently."""
    near = nearest(name, _known(), count=1) or list(_known())
    return UnusableInput(
        f"--target {name}: no rule knows this distribution",
        expected=f"one of {', '.join(_known())}",
        attempt=f"--target {near[0]}==RELEASE",
    )


def _warn_of_later(name: str, version: str) -> None:
    from packaging.version import Version

    newest = max(_known()[name], key=Version, default=version)
    if Version(Version(version).base_version) > Version(Version(newest).base_version):
        print(
            f"offload: --target {name}=={version} is later than {newest}, the latest that the rules know",
            file=sys.stderr,
        )


def _known() -> Mapping[str, tuple[str, ...]]:
    """Return the releases that the rules know of each distribution, oldest first.

    A development branch has none, nor has a distribution with faults known only to `diagnose`.
    """
    facts = knowledge.index()["releases"]
    of_faults = (
        *(name for fault in knowledge.index()["numbers"]["faults"] for name in fault.get("releases", ())),
        *(fix["package"] for fix in knowledge.index()["fixes"]),
    )
    known = {name: tuple(releases) for name, releases in facts["known"].items()}
    return known | {name: () for name in (*facts["replaces"], *of_faults) if name not in known}
