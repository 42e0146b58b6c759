# SPDX-License-Identifier: Apache-2.0
"""`offload card`: check finds differences and changes nothing, render mends them."""

import shutil
from pathlib import Path

import pytest

from skill_tools import bundle
from skill_tools.__main__ import main
from skill_tools.commands import card
from skill_tools.reports.checkout import pages_with_blocks
from skill_tools.reports.rule_folder import rule_pages

ROOT = bundle.root()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the documents and their sources; knowledge and rules stay those of the repository."""
    for name in (
        ".claude-plugin",
        "docs",
        "examples",
        "evals",
        "schema",
        "reference_impl",
        "skill_tools",
        "tests",
    ):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(card, "root", lambda: tmp_path)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["card", "check"])
    problems = capsys.readouterr().out.splitlines()
    assert code == bool(problems)
    return problems


@pytest.mark.slow
def test_a_table_changed_by_hand_is_found_and_mended(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkout / "docs" / "rules", ignore_errors=True)  # as in a clean clone
    # One of the tables of the repository, which is in step: nothing else is found.
    page = checkout / "docs" / "choosing.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("| no offload |", "| always offload |"), encoding="utf-8")
    assert check(capsys) == ["docs/choosing.md: differs from its data; run `offload card render`"]
    assert main(["card", "render"]) == 0
    assert capsys.readouterr().out == "wrote docs/choosing.md\n"
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_a_version_that_differs_is_found_and_mended(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`skill_tools.__version__` is the one that is written by hand."""
    shutil.rmtree(checkout / "docs" / "rules", ignore_errors=True)
    places = [".claude-plugin/marketplace.json", "CITATION.cff", "SKILL.md", "skill-card.md"]
    monkeypatch.setattr("skill_tools.__version__", "7.8.9")
    assert sorted(check(capsys)) == [
        f"{place}: differs from its data; run `offload card render`" for place in places
    ]
    assert main(["card", "render"]) == 0
    capsys.readouterr()
    assert check(capsys) == []
    for place in places:
        old, new = ((top / place).read_text("utf-8").splitlines() for top in (ROOT, checkout))
        changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        assert len(changed) == 1, place
        assert "7.8.9" in changed[0][1]


@pytest.mark.slow
def test_the_pages_are_built_and_pages_of_no_rule_removed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkout / "docs" / "rules"
    folder.mkdir(exist_ok=True)
    (folder / "la-gone.md").write_text("# la-gone\n", encoding="utf-8")
    assert main(["card", "pages"]) == 0
    assert f"wrote {len(rule_pages())} pages to docs/rules/" in capsys.readouterr().out
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == rule_pages()


LAYERS = "skill_tools/knowledge/rules/layer_activation_offload.yaml"
KEYS = "skill_tools/knowledge/keys.yaml"
CONDITION = "when: cpu_offloading and pipeline_model_parallel_size > 1"
# File, the replaced text, its replacement, and the problem.
BROKEN_SCHEMAS = [
    ("card.yaml", "step_ms: 996,", "step_ms: fast,", "'fast' is not of type 'number'"),
    (KEYS, "type: float", "type: real", "'real' is not"),
    (LAYERS, "tag: msg", "tag: guess", "la-num-layers-range: evidence/tag: 'guess' is not one of"),
    (LAYERS, CONDITION, "when: cpu_offloading and", "la-pp: when: 'cpu_offloading and' is not an expression"),
]
NO_YAML = [(LAYERS, "- id: la-pp\n", "- id: la-pp\n  - more\n", "is not YAML")]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [BROKEN_SCHEMAS, NO_YAML], ids=["schemas", "no YAML"])
def test_data_that_breaks_its_schema_is_named_before_anything_is_written(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: list[tuple[str, str, str, str]],
) -> None:
    """All places are named by `check`, and the first of them by the writing commands."""
    monkeypatch.setattr(bundle, "_PACKAGE", checkout / "skill_tools")
    for file, old, new, _ in broken:
        text = (checkout / file).read_text(encoding="utf-8")
        assert old in text
        (checkout / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    shutil.rmtree(checkout / "docs" / "rules", ignore_errors=True)
    (checkout / "docs" / "configuration.md").unlink()
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    found = check(capsys)
    assert len(found) == len(broken)
    for line, (*_, problem) in zip(found, broken, strict=True):
        assert problem in line
    for action in ("render", "pages"):
        assert main(["card", action]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert broken[0][-1] in said.err
        assert said.err.count("\n") == 1
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


WRONG_DOCUMENTS = [
    ("SKILL.md", "docs/faq.md)", "docs/gone.md)", "link to docs/gone.md: no such file"),
    ("README.md", "skill_tools lint run.yaml", "skill_tools lint --fast run.yaml", "lint --fast"),
    ("card.yaml", "rule: la-pp", "rule: la-gone", "no such rule: la-gone"),
    ("card.yaml", "pytorch: HybridDeviceOptimizer", "pytorch: NoOptimizer", "exports no NoOptimizer"),
]


@pytest.mark.slow
def test_wrong_documents_are_all_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "docs" / "new.md").write_text("<!-- card:wishes -->\n<!-- /card -->\n", encoding="utf-8")
    for page, old, new, _ in WRONG_DOCUMENTS:
        text = (checkout / page).read_text(encoding="utf-8")
        assert old in text
        (checkout / page).write_text(text.replace(old, new, 1), encoding="utf-8")
    complaints = check(capsys)
    assert "a page has a block of an unknown name: wishes" in complaints
    for _, _, _, problem in WRONG_DOCUMENTS:
        assert any(problem in line for line in complaints), problem


def test_without_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card, "root", lambda: tmp_path)
    assert main(["card", "check"]) == 2
    assert "is no checkout" in capsys.readouterr().err


def test_rendered_pages_are_not_taken_for_hand_written_ones() -> None:
    pages = pages_with_blocks(ROOT)
    assert ROOT / "docs" / "configuration.md" not in pages
    assert ROOT / "SKILL.md" in pages
