# SPDX-License-Identifier: Apache-2.0
"""The definition of a dialect, held to itself: a framework in one file beside its data, and every command knows it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.dialects import fields, registry
from skill_tools.dialects.base import Dialect, Evidence
from skill_tools.dialects.candidates import OPTIMIZER, OPTIMIZER_LABEL, Advice, Candidate, changed
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import Mode, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.reports.rule_folder import families
from skill_tools.rules.knowledge import load_rules

DATA = {
    "keys.yaml": """\
- key: num_layers
  spelling: {toy: depth}
- key: optimizer_offload_fraction
  spelling: {toy: states_on_host}
  default: {toy: 0.0}
- key: toy_wings
  mechanism: parallelism
  type: int
  spelling: {toy: wings}
  default: {toy: 2}
""",
    "vocabulary/toy.txt": "# what a toy accepts\ntoy\nname\n",
    "rules/toy.yaml": """\
- id: toy-one-wing
  title: A toy that offloads needs two wings
  mechanism: parallelism
  dialects: [toy]
  when: optimizer_offload_fraction > 0 and toy_wings < 2
  severity: error
  effect: raises
  raises: cannot fly
  message: offloading needs two wings
  why: One wing carries no states.
  evidence: {tag: msg, ref: "toy.py::fly", quote: cannot fly}
  next: Set wings to 2.
  fix: {applicability: safe, description: Give it two wings., set: {toy_wings: 2}}
  examples:
    toy:
      bad: "toy: 1\\nstates_on_host: 1.0\\nwings: 1\\n"
      good: "toy: 1\\nstates_on_host: 1.0\\nwings: 2\\n"
""",
}
BAD = "toy: 1\nname: llama-3-8b\nstates_on_host: 0.5\nwings: 1\nwing: 3\n"


class Toy(Dialect):
    name = "toy"
    label = "Toy"

    def evidence_in_entries(self, entries: Mapping[str, Node]) -> Evidence:
        return Evidence(20, certain=True) if "toy" in entries else Evidence()

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        draft = Draft(self.name)
        draft.complete = True
        for source in sources:
            draft.take(source)
            root = single_document(source)
            write_tree(draft, root, source.name)
            draft.model_name = str(plain(entries_of(root)["name"])) if "name" in entries_of(root) else None
        for text in overrides:
            key, _, value = text.partition("=")
            draft.set(key, value, Place("<overrides>", 1, 1))
        return draft.finish()

    def run(self, config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
        return TrainingRun(self.name, shape, Layout(gpus=gpus or 1), seq_length=2048, shards_optimizer=False)

    def current(self, config: Config, run: TrainingRun) -> Mode:
        return Mode(optimizer_fraction=fields.number(config, "optimizer_offload_fraction") or 0.0)

    def candidates(self, config: Config, run: TrainingRun, advice: Advice) -> Iterator[Candidate]:
        for recompute in (Recompute(), Recompute(granularity="full")):
            yield Candidate(Mode(recompute=recompute), "as it is", (), {})
            settings = changed(config, {"optimizer_offload_fraction": 1.0})
            mode = Mode(optimizer_fraction=1.0, recompute=recompute)
            yield Candidate(mode, f"{OPTIMIZER_LABEL} 100%", (OPTIMIZER,), settings)


@pytest.fixture(autouse=True)
def toy(tmp_path: Path) -> Iterator[None]:
    for name, text in DATA.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    registry.register(Toy(), tmp_path / "data")
    yield
    registry.unregister("toy")


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BAD, encoding="utf-8")
    return path


def test_its_facts_keep_the_schemas_as_they_are() -> None:
    for kind, name in (("keys", "keys.yaml"), ("rules", "rules/toy.yaml")):
        assert_follows(yaml.safe_load(DATA[name]), kind)


def test_its_family_is_called_like_it() -> None:
    rules = [rule for rule in load_rules() if rule.id == "toy-one-wing"]
    assert families(rules)["toy"] == "Toy"


def test_lint_recognises_it_by_its_evidence(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--format", "json", str(run_yaml)]) == 1
    found = {each["rule"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found.keys() == {"toy-one-wing", "unknown-key"}
    assert found["toy-one-wing"]["line"] == 4  # the fix's change
    assert "states_on_host=0.5 (line 3), wings=1 (line 4)" in found["toy-one-wing"]["message"]
    assert "nearest: wings" in found["unknown-key"]["message"]


def test_lint_takes_its_name_and_fixes_its_file(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--framework", "toy", "--fix", str(run_yaml)]) == 1
    assert run_yaml.read_text(encoding="utf-8") == BAD.replace("wings: 1", "wings: 2")
    assert main(["lint", "--framework", "megatron-lm", str(run_yaml)]) == 2
    assert "--framework toy, by its own words" in capsys.readouterr().err


def test_what_is_nobodys_is_offered_to_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "what.yaml").write_text("a: 1\n", encoding="utf-8")
    assert main(["lint", "--explain", str(tmp_path / "what.yaml")]) == 2
    assert "\n  Toy: " in capsys.readouterr().err


def test_plan_proposes_in_its_own_keys(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_yaml.write_text("toy: 1\nname: llama-3-8b\n", encoding="utf-8")
    assert main(["plan", str(run_yaml), "--gpu", "h200", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert_follows(plan, "plan")
    assert plan["dialect"] == "toy"
    (share,) = plan["recommendation"]["patch"]["settings"].values()
    assert plan["recommendation"]["patch"]["text"] == f"states_on_host: {share}\n"
    assert plan["execute"] is None


def test_plan_asks_its_rules_what_is_legal(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_yaml.write_text("toy: 1\nname: llama-3-8b\nwings: 1\n", encoding="utf-8")
    assert main(["plan", str(run_yaml), "--gpu", "h200"]) == 2
    assert "nothing legal fits" in capsys.readouterr().err


def test_explain_shows_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "toy-one-wing"]) == 0
    assert "## Wrong (toy)\n\n```yaml\ntoy: 1\n" in capsys.readouterr().out


def test_nothing_of_it_is_left_behind(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry.unregister("toy")
    try:
        assert main(["explain", "toy-one-wing"]) == 2
        assert main(["lint", "--framework", "toy", str(run_yaml)]) == 2
    finally:
        registry.register(Toy(), run_yaml.parent / "data")
