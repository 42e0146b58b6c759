# SPDX-License-Identifier: Apache-2.0
"""Holds the rules to megatron-core itself: generated configurations, one release a process, both directions.

    python tests/megatron/judge.py --configurations 10000 0.13.1 0.16.1 ../Megatron-LM

A release is a version that `fetch.py` has unpacked, or a source tree; the command line is judged where a tree has its
code. For every configuration the release must raise an error about offloading exactly if a rule with the effect
`raises` fires for that version, with a text quoted in the rule. Where a configuration breaks several rules the release
raises one of their texts. An error that is known to have nothing to do with offloading (`FOREIGN`) hides all errors
after it: such configurations are counted as hidden and prove nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hypothesis import HealthCheck, Phase, given, settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from configurations import Fields  # noqa: E402
from fetch import EXTRAS, tree_of, trees  # noqa: E402
from subjects import COMMAND_LINE, KEYS, OPTIMIZER, TRANSFORMER, Subject  # noqa: E402
from witness import PRETENDED_TRANSFORMER_ENGINE, Late  # noqa: E402

from skill_tools.rules.knowledge import Rule, load_rules_yaml  # noqa: E402
from skill_tools.rules.lint import lint  # noqa: E402
from skill_tools.rules.versions import Standing, standing  # noqa: E402

# Errors of the drawn configurations that have nothing to do with offloading. Any other text that no rule has is a
# disagreement, so that a rule is missed when it is taken away, whatever its words.
FOREIGN = re.compile(
    "|".join(
        [
            "overlap_moe_expert_parallel_comm|EP A2A overlap",
            "moe_flex_dispatcher_backend=.* requires|moe_token_dispatcher_type",
            "enable_cuda_graph (?:and|or) external_cuda_graph",
            "Invalid cuda graph implementation",
            "please use cuda_graph_impl=local instead",
            "full recompute is only supported with full iteration",
            "CUDA graphs not supported with activation recomputation",
            "dropout is not supported with graphed",
            "cuda_graph_modules must be empty",
            "cuda_graph_modules='full_iteration' cannot be combined",
            "cuda graph is only supported (?:for|with) ",
            "must not contain both moe and moe_router",
            "moe recompute is not supported with moe_router CUDA graph",
            "requires FusedAdam from TransformerEngine",
            "not supported between instances of 'NoneType' and 'Version'",
        ]
    )
)


class Disagreement(AssertionError):
    """The rules and the release say different things about one configuration."""


class Witness:
    """One release in a process of its own, asked with `raised`."""

    def __init__(self, process: subprocess.Popen[str], said: IO[str]) -> None:
        self._process = process
        self._said = said
        facts = self._read()
        self.version: str = facts["version"]
        self.has_arguments: bool = facts["has_arguments"]

    def raised(self, question: dict[str, Any]) -> str | None:
        """Return the text of the error that the release raises, if any; raises `Late` where it does not answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer.get("late"):
            raise Late
        text: str | None = answer["text"]
        return text

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise SystemExit(f"the release cannot be imported, or its process died:\n{self._said.read()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def summon(tree: Path) -> Iterator[Witness]:
    """Start the release in `tree`; it ends with the block."""
    command = [sys.executable, str(HERE / "witness.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(EXTRAS)])}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=said, env=environment, text=True
        ) as process,
    ):
        yield Witness(process, said)


class Judge:
    """Compares one subject of one release with the rules that speak about it, and counts."""

    def __init__(self, witness: Witness, subject: Subject) -> None:
        self.witness = witness
        self.subject = subject
        self.versions = {
            "megatron-core": witness.version,
            "transformer-engine": PRETENDED_TRANSFORMER_ENGINE,
        }
        self.rules = [rule for rule in load_rules_yaml() if subject.concerns(rule, witness.version)]
        self.counts: Counter[str] = Counter()
        self.confirmed: Counter[str] = Counter()
        self.hidden_by: Counter[str] = Counter()

    def hold(self, fields: Fields) -> None:
        """Judge one configuration; raises Disagreement."""
        try:
            text = self.witness.raised(self.subject.question(fields))
        except Late:
            self.counts["no answer"] += 1
            return
        fired = self._fired(fields)
        speaking = [rule.id for rule in fired if text is not None and _says(rule, text)]
        self.counts["configurations"] += 1
        if text is None:
            if fired:
                raise Disagreement(f"{_ids(fired)} fired, and the release accepts {fields}")
            self.counts["accepted"] += 1
        elif speaking:
            self.counts["refused"] += 1
            self.confirmed.update(speaking)
        elif "offload" in text.lower() or not (self.subject.checks_much_else or FOREIGN.search(text)):
            raise Disagreement(
                f"the release raises {text!r}, and of the rules {_ids(fired)} fired, for {fields}"
            )
        else:
            self.counts["hidden"] += 1
            self.hidden_by[text.splitlines()[0][:90]] += 1

    def unconfirmed(self) -> list[str]:
        """Return the rules of this release whose text it never raised."""
        return [
            rule.id
            for rule in self.rules
            if rule.id not in self.confirmed
            and standing(rule.versions, self.versions)[0] is not Standing.ABSENT
        ]

    def _fired(self, fields: Fields) -> list[Rule]:
        verdict = lint(self.subject.config(fields), rules=self.rules, versions=self.versions, keys=KEYS)
        if verdict.undecided:
            raise Disagreement(f"{[rule.rule for rule in verdict.undecided]} are undecided for {fields}")
        by_id = {rule.id: rule for rule in self.rules}
        return [by_id[finding.rule] for finding in verdict.findings]


def _says(rule: Rule, text: str) -> bool:
    """Return whether `text` is one that `rule` quotes, `{..}` standing for anything."""
    patterns = (".*".join(re.escape(part) for part in quote.split("{..}")) for quote in rule.raises)
    return any(re.search(pattern, text, re.DOTALL) for pattern in patterns)


def _ids(rules: Sequence[Rule]) -> list[str]:
    return [rule.id for rule in rules]


def judge(tree: Path, configurations: int, command_lines: int) -> bool:
    """Judge every subject of the release in `tree`, print the counts, and say whether all agreed."""
    with summon(tree) as witness:
        verdicts = [_sit(Judge(witness, subject), configurations) for subject in (TRANSFORMER, OPTIMIZER)]
        if witness.has_arguments:
            verdicts.append(_sit(Judge(witness, COMMAND_LINE), command_lines))
    return all(verdicts)


def _sit(sitting: Judge, configurations: int) -> bool:
    """Let one judge see `configurations`, print its counts, and say whether it agreed with all of them."""

    @settings(
        max_examples=configurations,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(sitting.subject.draw(sitting.witness.version))
    def hold(fields: Fields) -> None:
        sitting.hold(fields)

    disagreement = None
    try:
        hold()
    except Disagreement as found:
        disagreement = found
    print(f"megatron-core {sitting.witness.version} {sitting.subject.name}: {dict(sitting.counts)}")
    print(f"  confirmed: {dict(sorted(sitting.confirmed.items()))}")
    print(f"  never confirmed: {sitting.unconfirmed()}")
    print(f"  hidden by: {dict(sitting.hidden_by.most_common(5))}")
    print(f"  {'all agreed' if disagreement is None else f'DISAGREED: {disagreement}'}", flush=True)
    return disagreement is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("releases", nargs="*", help="a version, or a source tree; default: all unpacked ones")
    parser.add_argument("--configurations", type=int, default=10_000, help="of each dataclass")
    parser.add_argument("--command-lines", type=int, default=2_000, help="a hundred times slower to judge")
    arguments = parser.parse_args()
    named = [Path(name) if Path(name).is_dir() else tree_of(name) for name in arguments.releases]
    counts = (arguments.configurations, arguments.command_lines)
    results = [judge(tree, *counts) for tree in named or trees()]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
