"""`offload card`: check finds what differs and changes nothing, render mends it."""

import shutil
from pathlib import Path

import pytest

from skill_tools import bundle
from skill_tools.__main__ import main
from skill_tools.commands import card
from skill_tools.reports.checkout import pages_with_blocks
from skill_tools.reports.rule_pages import rule_pages

ROOT = bundle.root()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the documents consist of; knowledge and rules stay those of the repository."""
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


@pytest.mark.slow  # the next test begins with a copy that is in step, and `make check` asks it of the repository
def test_the_repository_is_in_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys) == []


@pytest.mark.slow
def test_a_table_changed_by_hand_is_found_and_mended(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkout / "docs" / "rules", ignore_errors=True)  # as in a clean clone
    page = checkout / "docs" / "choosing.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("| no offload |", "| always offload |"), encoding="utf-8")
    assert check(capsys) == ["docs/choosing.md: differs from its data; run `offload card render`"]
    assert main(["card", "render"]) == 0
    assert capsys.readouterr().out == "wrote docs/choosing.md\n"
    assert page.read_text(encoding="utf-8") == text


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


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "rules/layer_activation_offload.yaml",
            "tag: msg",
            "tag: guess",
            "la-pp: evidence/tag: 'guess' is not one of",
        ),
        pytest.param(
            "rules/layer_activation_offload.yaml",
            "when: cpu_offloading and pipeline_model_parallel_size > 1",
            "when: cpu_offloading and",
            "la-pp: when: 'cpu_offloading and' is not an expression",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rules/layer_activation_offload.yaml",
            "- id: la-pp\n",
            "- id: la-pp\n  - more\n",
            "is not YAML",
            marks=pytest.mark.slow,
        ),
        pytest.param("keys.yaml", "type: float", "type: real", "'real' is not", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_data_that_breaks_its_schema_is_named_before_anything_is_written(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    old: str,
    new: str,
    problem: str,
) -> None:
    monkeypatch.setattr(bundle, "_PACKAGE", checkout / "skill_tools")
    path = checkout / "skill_tools" / "knowledge" / file
    text = path.read_text(encoding="utf-8")
    after = text.index("- id: la-pp\n") if "la-pp" in problem or "YAML" in problem else 0
    path.write_text(text[:after] + text[after:].replace(old, new, 1), encoding="utf-8")
    shutil.rmtree(checkout / "docs" / "rules", ignore_errors=True)
    (checkout / "docs" / "configuration.md").unlink()
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    assert any(problem in line for line in check(capsys))
    for action in ("render", "pages"):
        assert main(["card", action]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert problem in said.err
        assert said.err.count("\n") == 1
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before


WRONG_DOCUMENTS = [
    ("SKILL.md", "docs/faq.md)", "docs/gone.md)", "link to docs/gone.md: no such file"),
    ("SKILL.md", 'version: "0.1.0"', 'version: "0.2.0"', "SKILL.md metadata.version is 0.2.0"),
    ("README.md", "skill_tools lint run.yaml", "skill_tools lint --fast run.yaml", "lint --fast"),
    ("pyproject.toml", 'version = "0.1.0"', 'version = "0.3.0"', "project.version is 0.3.0"),
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


@pytest.mark.slow
def test_a_card_that_breaks_its_schema_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkout / "card.yaml"
    text = path.read_text(encoding="utf-8")
    assert "step_ms: 996," in text
    path.write_text(text.replace("step_ms: 996,", "step_ms: fast,", 1), encoding="utf-8")
    assert any("'fast' is not of type 'number'" in line for line in check(capsys))


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
