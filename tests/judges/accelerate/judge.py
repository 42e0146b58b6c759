# SPDX-License-Identifier: Apache-2.0
"""Holds the rules and the reader to Accelerate itself: generated launches, one release a process, both directions.

    python tests/judges/accelerate/judge.py --configurations 5000 build/accelerate/1.15.0

For every launch the release must end with an error exactly when a rule with the effect `raises` fires for it, with a
text that the rule quotes. If it starts, the reader must give FSDP, DeepSpeed and Megatron the values of the release's
plugins, and taking out a setting that a rule calls ignored must change nothing. The names of the vocabulary are the
release's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from configurations import FILE, Launch, drawn  # noqa: E402
from fetch import EXTRAS  # noqa: E402

from skill_tools.configs.config import Config  # noqa: E402
from skill_tools.configs.keys import load_keys  # noqa: E402
from skill_tools.configs.vocabulary import load_vocabulary  # noqa: E402
from skill_tools.dialects.read import read  # noqa: E402
from skill_tools.rules.finding import Finding  # noqa: E402
from skill_tools.rules.knowledge import Rule, load_rules_yaml  # noqa: E402
from skill_tools.rules.lint import lint  # noqa: E402

IGNORED = ("acc-sub-key", "acc-pin-key", "acc-section-type", "acc-fsdp2-dead-yaml", "acc-fsdp1-reshard-dead")


class Disagreement(AssertionError):
    """The rules and the release say different things about one launch."""


class Witness:
    """One release in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], said: IO[str]) -> None:
        self._process = process
        self._said = said
        self.facts = self._read()

    def ask(self, launch: Launch) -> dict[str, Any]:
        """Return the text of the error and the state of the plugins."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(launch._asdict()) + "\n")
        self._process.stdin.flush()
        return self._read()

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
    """Compares one release with rules and reader, and counts."""

    def __init__(self, witness: Witness, rules: Sequence[Rule]) -> None:
        self.witness = witness
        self.versions = {"accelerate": witness.facts["version"]}
        self.rules = {rule.id: rule for rule in rules if rule.id.startswith("acc-")}
        self.counts: Counter[str] = Counter()
        self.confirmed: Counter[str] = Counter()

    def hold(self, launch: Launch) -> None:
        """Judge one launch; raises Disagreement."""
        answer = self.witness.ask(launch)
        config = as_read(launch)
        found, undecided = self._found(config)
        raising = [each for each in found if self.rules[each.rule].effect == "raises"]
        text, state = answer["text"], answer["state"]
        self.counts["configurations"] += 1
        if text is not None:
            speaking = [each.rule for each in raising if _says(self.rules[each.rule], text)]
            hidden = raising and any(_says(self.rules[name], text) for name in undecided)
            if not speaking and not hidden:
                raise Disagreement(f"the release raises {text!r}, and of the rules {_ids(raising)} fired")
            self.counts["refused"] += 1
            self.confirmed.update(speaking)
            return
        if raising:
            raise Disagreement(f"{_ids(raising)} fired, and the release starts")
        self.counts["started"] += 1
        _compare(config, state, self.versions["accelerate"])
        self._hold_ignored(launch, found, state)

    def hold_names(self) -> None:
        """Hold the vocabulary to the release's own names."""
        names = load_vocabulary("accelerate").names
        fields = {name for name in names if "." not in name and not name.startswith("--")}
        options = {name.rpartition(".")[2].lstrip("-") for name in names} - fields
        known = set(self.witness.facts["options"])
        too_new = {key.name.rpartition(".")[2] for key in load_keys().values() if "accelerate" in key.exists}
        if missing := set(self.witness.facts["fields"]) - fields:
            raise Disagreement(f"fields of the release that the vocabulary lacks: {missing}")
        if missing := known - options - fields:
            raise Disagreement(f"options of the release that the vocabulary lacks: {missing}")
        ours = {
            "fsdp_ignored_modules",
            "backends",
            "negated_options",
            "zero_missing",
            "type_missing",
            "options_since_1_15",
            "script",
            "offload_call",
        }
        ours |= {"deepspeed_fields_from_accelerate_config", "mpirun_hostfile", "dynamo_backend"}
        if beyond := options - known - ours - too_new:
            raise Disagreement(f"options of the vocabulary that the release lacks: {beyond}")

    def _found(self, config: Config) -> tuple[list[Finding], list[str]]:
        """Return the rules found, and the rules left undecided by a found value of a wrong type."""
        verdict = lint(config, rules=list(self.rules.values()), versions=self.versions)
        undecided = [each.rule for each in verdict.undecided if self.rules[each.rule].effect == "raises"]
        if undecided and not config.wrong_types:
            raise Disagreement(f"{undecided} are undecided")
        return [each for each in verdict.findings if each.rule in self.rules], undecided

    def _hold_ignored(self, launch: Launch, found: Sequence[Finding], state: object) -> None:
        """Take out each line of the file that a rule calls ignored; nothing may change."""
        for finding in found:
            if finding.rule not in IGNORED or finding.place.file.rpartition("/")[2] != FILE:
                continue
            without = _without(launch, finding.place.line)
            if without is None:
                continue
            if self.witness.ask(without)["state"] != state:
                raise Disagreement(f"{finding.rule} calls line {finding.place.line} ignored, and it is not")
            self.confirmed[finding.rule] += 1


def as_read(launch: Launch) -> Config:
    """Return the launch as the reader of scripts sees it, or the file alone where nothing stands beside it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**launch.files, "run.sh": launch.script()}.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        alone = len(launch.arguments) == 2 and not launch.environment
        return read([Path(folder) / (FILE if alone else "run.sh")], framework="accelerate")


def _compare(config: Config, state: Mapping[str, Any], version: str) -> None:
    """Hold the reader's values to the plugins' values."""
    kind = state["kind"]
    ours = str(config.value("accelerate.distributed_type"))
    if {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}.get(ours, "none") != kind:
        raise Disagreement(f"the release trains with {kind}, the reader says {ours}")
    expected: dict[str, object] = {}
    if kind == "fsdp":
        expected = _of_fsdp(state, version)
    elif kind == "deepspeed":
        expected = _of_deepspeed(state["config"])
    elif kind == "megatron":
        for name in (
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "overlap_cpu_optimizer_d2h_h2d",
        ):
            expected[f"accelerate.megatron_lm_config.megatron_lm_{name}"] = state[name] == "True"
    keys = load_keys()
    for name, value in expected.items():
        if name in config.unresolved or name in config.maybe_set:
            continue
        default = keys[name].default.get(name.partition(".")[0]) if name in keys else None
        said = config.value(name, default)
        if (said or "none") != (value or "none"):
            raise Disagreement(f"{name} is {value!r} in the release, the reader says {said!r}")


def _of_fsdp(state: Mapping[str, str], version: str) -> dict[str, object]:
    section = "accelerate.fsdp_config.fsdp_"
    second = state["fsdp_version"] == "2"
    offloads = ("CPUOffloadPolicy(pin_memory=True)", "CPUOffload(offload_params=True)")
    expected: dict[str, object] = {
        f"{section}version": int(state["fsdp_version"]),
        f"{section}offload_params": state["cpu_offload"] in offloads,
        f"{section}activation_checkpointing": state["activation_checkpointing"] == "True",
    }
    if second:
        expected[f"{section}reshard_after_forward"] = state["reshard_after_forward"] == "True"
    else:
        expected[f"{section}sharding_strategy"] = state["sharding_strategy"].partition(".")[2]
    if version >= "1.15":
        expected[f"{section}activation_checkpointing_offload"] = (
            state["activation_checkpointing_offload"] == "True"
        )
    return expected


def _of_deepspeed(config: Mapping[str, Any]) -> dict[str, object]:
    zero = config["zero_optimization"]
    expected: dict[str, object] = {
        "deepspeed.zero_optimization.stage": zero.get("stage", 0),
        "deepspeed.bf16.enabled": config["bf16"]["enabled"],
    }
    for name in ("offload_optimizer", "offload_param"):
        device = zero.get(name, {}).get("device")
        expected[f"deepspeed.zero_optimization.{name}.device"] = device
        if device == "nvme":
            expected[f"deepspeed.zero_optimization.{name}.nvme_path"] = zero[name]["nvme_path"]
    return expected


def _without(launch: Launch, line: int) -> Launch | None:
    """Return the launch without the entry at `line` of its file, if the rest can be read."""
    lines = launch.files[FILE].splitlines()
    taken = lines[line - 1]
    depth = len(taken) - len(taken.lstrip())
    end = line
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > depth:
        end += 1
    text = "\n".join(lines[: line - 1] + lines[end:])
    try:
        yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return launch._replace(files=launch.files | {FILE: text})


def _says(rule: Rule, text: str) -> bool:
    """Return whether `text` is one that `rule` quotes, `{..}` standing for anything."""
    patterns = (".*".join(re.escape(part) for part in quote.split("{..}")) for quote in rule.raises)
    return any(re.search(pattern, text, re.DOTALL) for pattern in patterns)


def _ids(findings: Sequence[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


def sitting(tree: Path, count: int, *, without: str = "", first_seed: int = 0) -> Judge:
    """Judge `count` launches of one release, with all rules but one if it is named."""
    rules = [rule for rule in load_rules_yaml() if rule.id != without]
    with summon(tree) as witness:
        judge = Judge(witness, rules)
        judge.hold_names()
        for seed in range(first_seed, first_seed + count):
            launch = drawn(seed)
            try:
                judge.hold(launch)
            except Disagreement as disagreement:
                raise Disagreement(
                    f"seed {seed}: {disagreement}\n{launch.script()}\n{launch.files}"
                ) from None
        return judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--configurations", type=int, default=5000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--without", default="", help="the id of a rule to leave out")
    options = parser.parse_args()
    for tree in options.trees:
        try:
            judge = sitting(
                tree, options.configurations, without=options.without, first_seed=options.first_seed
            )
        except Disagreement as disagreement:
            print(f"{tree.name}: {disagreement}")
            return 1
        print(f"{tree.name}: {dict(judge.counts)}, confirmed {dict(judge.confirmed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
