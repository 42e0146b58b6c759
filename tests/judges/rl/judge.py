# SPDX-License-Identifier: Apache-2.0
"""Compares the rules with the own answers of verl, NeMo-RL, ms-swift and prime-rl, in both directions.

    python tests/judges/rl/judge.py --configurations 5000

For each release fetched by `fetch.py`, an error raised by it must be among our findings. A finding called an error of
its checks must be raised, unless an earlier check ended the run. Warnings are compared as sets. The exit code is 1 if
any configuration disagrees.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

from configurations import FRAMEWORKS, Asked, configurations

from skill_tools.dialects.read import read_text
from skill_tools.rules.knowledge import Rule, load_rules_yaml
from skill_tools.rules.lint import lint

ROOT = Path(__file__).parents[3]
WITNESS = Path(__file__).parent / "witness.py"
RELEASES = {
    "verl": {"0.6.1": "0.6.1", "0.7.1": "0.7.1", "0.8.0": "0.8.0", "0.9.1": "0.9.1"},
    "nemo_rl": {"0.6.0": "0.6.0", "0.7.0": "0.7.0", "main": "0.8.0.dev0"},
    "ms_swift": {"3.12.6": "3.12.6", "4.0.4": "4.0.4", "4.3.2": "4.3.2", "4.5.3": "4.5.3", "4.6.0": "4.6.0"},
    "prime_rl": {"0.6.0": "0.6.0", "0.7.0": "0.7.0", "0.8.0": "0.8.0", "main": "0.8.1.dev0"},
}
# The rules about code of each framework that the witness runs; the other rules are about workers, or about other files.
JUDGED = {
    "verl": {"verl-strategy", "verl-unknown-key", "verl-mcore-hdo", "verl-key-release"},
    "nemo_rl": {
        "nr-fraction", "nr-fraction-one", "nr-distopt", "nr-optimizer", "nr-overlap", "nr-fg-modules", "nr-fg-moe",
    },
    "ms_swift": {"sw-fsdp-deepspeed", "sw-device-map", "sw-fsdp2-save-only", "sw-fsdp2-gc"},
    "prime_rl": {
        "pr-offload-both", "pr-offload-both-set", "pr-full-and-optim", "pr-full-optimizer", "pr-muon", "pr-multi-run",
        "pr-full-clip", "pr-full-old", "pr-unknown-key",
    },
}  # fmt: skip
# Said by the releases, and about no offload: a removed field, and the preset missing in the wheel of 3.12.6.
ELSEWHERE = re.compile(
    r"gradient_checkpointing is enabled with FSDP2|max_concurrent_runs\n  Extra inputs|Expecting value: line 1 column 1"
)


def main() -> int:
    """Judge every release that is there; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("frameworks", nargs="*", default=list(FRAMEWORKS))
    arguments = parser.parse_args()
    total = 0
    for framework in arguments.frameworks:
        asked = list(configurations(framework, arguments.configurations, arguments.seed))
        for folder, version in RELEASES[framework].items():
            path = ROOT / "build" / framework / folder
            if not path.is_dir():
                print(f"{framework} {folder}: not fetched (python tests/judges/rl/fetch.py)")
                continue
            total += judged(framework, path, version, asked)
    return int(total > 0)


def judged(framework: str, path: Path, version: str, asked: list[Asked]) -> int:
    """Print the answers of one release and the rules to `asked`, and return how often they disagree."""
    answers = answered(framework, path, asked)
    rules = [rule for rule in load_rules_yaml() if rule.id in JUDGED[framework]]
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for one, answer in zip(asked, answers, strict=True):
        counts["raised"] += bool(answer["errors"])
        for problem in disagreements(framework, version, one, answer, rules):
            counts["disagree"] += 1
            counts[problem] += 1
            shown.setdefault(problem, one.text)
    print(
        f"{framework} {version}: {len(asked)} asked, {counts['raised']} raised, {counts['disagree']} disagree"
    )
    for problem, text in list(shown.items())[:5]:
        print(f"  {counts[problem]} x {problem}\n{text}")
    return counts["disagree"]


def answered(framework: str, path: Path, asked: list[Asked]) -> list[dict[str, list[str]]]:
    """Return a release's answers."""
    questions = "".join(json.dumps(one.question) + "\n" for one in asked)
    done = subprocess.run(
        [sys.executable, str(WITNESS), framework, str(path)],
        input=questions,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "build" / "rl" / "libraries")},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def disagreements(
    framework: str, version: str, one: Asked, answer: dict[str, list[str]], rules: list[Rule]
) -> list[str]:
    """Return the errors that a release has and the rules have not, and the other way round."""
    name = framework.replace("_", "-")
    stated = f"# {name}=={version}\n" if one.filename.endswith(".sh") else ""
    config = read_text(f"{stated}{one.text}", one.filename, framework=name)
    verdict = lint(config, rules=rules, versions={name: version})
    found = {finding.rule for finding in verdict.findings}
    raising = {rule.id for rule in rules if rule.effect == "raises"}
    problems = [f"undecided: {each.rule}" for each in verdict.undecided]
    raised = {
        rule.id for rule in rules for text in answer["errors"] if rule.id in raising and says(rule, text)
    }
    if any(ELSEWHERE.search(text) for text in answer["errors"]):
        return problems
    if answer["errors"] and not raised & found:
        problems.append(f"raised, not found: {answer['errors'][0].splitlines()[0]} (found {sorted(found)})")
    if not answer["errors"]:
        problems += [f"found, not raised: {each}" for each in sorted(found & raising)]
        warned = {rule.id for rule in rules for text in answer["warnings"] if says(rule, text)}
        problems += [f"warned, not found: {each}" for each in sorted(warned - found)]
        problems += [f"found, not warned: {each}" for each in sorted(found - raising - warned)]
        problems += [
            f"warned, no rule has the text: {text[:80]}"
            for text in answer["warnings"]
            if "offload" in text
            and not ELSEWHERE.search(text)
            and not any(says(rule, text) for rule in rules)
        ]
    return problems


def says(rule: Rule, text: str) -> bool:
    """Whether `text` holds the text that the framework prints by the rule; `{..}` stands for anything."""
    patterns = (re.escape(one).replace(re.escape("{..}"), ".*") for one in rule.raises)
    return any(re.search(pattern, text) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
