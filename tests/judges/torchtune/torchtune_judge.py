# SPDX-License-Identifier: Apache-2.0
"""Our verdict against torchtune's own recipes, for generated configurations and every release that is there.

    python tests/judges/torchtune/torchtune_judge.py --configurations 5000

A recipe raises its first error alone, so a raised text must be among our findings, and our errors must be raised at
all. An ignored key is judged by the keys that the recipe reads of its configuration; warnings are compared as sets.
With `--mutants`, each judged rule is taken away in turn, and the answers have to show it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml
from torchtune_configurations import Asked, drawn

from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_sources
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.rules.lint import lint

FOLDER = Path(__file__).parents[3] / "build" / "judges" / "torchtune"
WITNESS = Path(__file__).with_name("torchtune_witness.py")
RAISING = ("raises", "raises-at-build")
# Errors raised by a recipe, and keys left unread by it, before its first step.
JUDGED = [
    rule
    for rule in load_rules()
    if rule.when
    and rule.id.startswith("tt-")
    and rule.evidence.ref.startswith("recipes/")
    and rule.effect in (*RAISING, "warns", "ignored")
]
KEY_OF = {
    "tt-offload-single": "fsdp_cpu_offload",
    "tt-ao-missing-recipe": "enable_activation_offloading",
}
# Errors that are ours to know; the recipes raise more, about other things.
CONCERNS = re.compile(r"offload|in.?bwd|fused optimizer|compiling the optimizer", re.IGNORECASE)


def installed() -> list[str]:
    """Return the releases that are there, oldest first."""
    found = [path.parent.name for path in FOLDER.glob("[0-9]*/recipes")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class Release:
    """One release's recipes, running; a context manager, so that the process ends with the judge."""

    def __init__(self, version: str) -> None:
        self.version = version
        command = [sys.executable, str(WITNESS), str(FOLDER / version), str(FOLDER / "dependencies")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, asked: Asked) -> dict[str, Any]:
        """Return the recipe's error, the keys that it read, and its warnings."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked._asdict()) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def says(rule: Rule, text: str) -> bool:
    """Whether `text` is the text that the framework prints by the rule."""
    return any(one in text for one in rule.raises)


class Heard(NamedTuple):
    """A configuration with the recipe's answer and our own: the broken rules, and the open ones."""

    asked: Asked
    answer: dict[str, Any]
    found: set[str]
    undecided: set[str]


def verdict(asked: Asked, version: str, folder: Path) -> tuple[set[str], set[str]]:
    """Return the broken rules, and the open ones, as a user would learn them from a script."""
    (folder / "config.yaml").write_text(
        yaml.dump(asked.config, Dumper=yaml.CSafeDumper, sort_keys=False), encoding="utf-8"
    )
    launcher = f"--nproc_per_node {asked.world} " if asked.recipe.endswith("_distributed") else ""
    script = f"tune run {launcher}{asked.recipe} --config config.yaml\n"
    config = read_sources([Source("run.sh", script, folder)])
    result = lint(config, rules=JUDGED, versions={"torchtune": version, "torchao": "0.18.0"})
    return {finding.rule for finding in result.findings}, {each.rule for each in result.undecided}


def disagreements(heard: Heard, rules: Sequence[Rule]) -> Iterator[str]:
    """Yield where the recipe and our verdict differ, as it would be with `rules` alone."""
    asked, answer, found, undecided = heard
    found = found & {rule.id for rule in rules}
    yield from (f"undecided: {rule}" for rule in sorted(undecided))
    raising = {rule.id: rule for rule in rules if rule.effect in RAISING}
    expected = found & raising.keys()
    raised = answer["raised"]
    if raised is not None:
        telling = {identifier for identifier, rule in raising.items() if says(rule, raised)}
        if telling and not telling & expected:
            yield f"raised, not found: {sorted(telling)}"
        elif not telling and CONCERNS.search(raised):
            yield f"raised, no rule has the text: {raised}"
        return
    yield from (f"found, not raised: {rule}" for rule in sorted(expected))
    for rule in rules:
        key = KEY_OF.get(rule.id)
        ignored = key is not None and asked.config.get(key) is True and key not in answer["read"]
        if key is not None and ignored != (rule.id in found):
            yield f"{'ignored, not found' if ignored else 'found, not ignored'}: {rule.id}"
        if rule.effect == "warns" and any(says(rule, text) for text in answer["warned"]) != (
            rule.id in found
        ):
            yield f"warned and found differ: {rule.id}"
    for key in set(KEY_OF.values()) - {KEY_OF[rule.id] for rule in rules if rule.id in KEY_OF}:
        if asked.config.get(key) is True and key not in answer["read"]:
            yield f"ignored, no rule says it: {key}"
    if any(CONCERNS.search(text) for text in answer["warned"]) and not any(
        says(rule, text) for rule in rules for text in answer["warned"]
    ):
        yield "warned, no rule has the text"


def answers(version: str, seeds: Iterable[int]) -> list[Heard]:
    """Return a release's answer to each configuration whose recipe it has, and ours."""
    heard = []
    with Release(version) as release, tempfile.TemporaryDirectory() as name:
        for asked in map(drawn, seeds):
            answer = release.ask(asked)
            if not answer.get("absent"):
                heard.append(Heard(asked, answer, *verdict(asked, version, Path(name))))
    return heard


def judged(heard: Sequence[Heard], rules: Sequence[Rule]) -> list[str]:
    """Return every disagreement, each with the configuration that shows it."""
    return [
        f"{each.asked.recipe}: {one}: {each.asked}" for each in heard for one in disagreements(each, rules)
    ]


def main() -> int:
    """Judge every release; return 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--mutants", action="store_true", help="take each judged rule away in turn")
    stated = parser.parse_args()
    failed = False
    heard_of = {}
    for version in installed():
        heard = heard_of[version] = answers(version, range(stated.configurations))
        problems = judged(heard, JUDGED)
        outcomes = Counter("raised" if each.answer["raised"] else "ran" for each in heard)
        print(f"torchtune {version}: {dict(outcomes)}, {len(problems)} disagreements")
        print("\n".join(problems[:5]))
        failed |= bool(problems)
    for rule in JUDGED if stated.mutants else ():
        others = [each for each in JUDGED if each is not rule]
        seen = {version for version, heard in heard_of.items() if judged(heard, others)}
        print(f"without {rule.id}: {'seen in ' + ', '.join(sorted(seen)) if seen else 'NOT SEEN'}")
        failed |= not seen
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
