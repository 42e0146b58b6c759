"""The wheel as a user installs it: complete, and working in an environment that has nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skill_tools.bundle import root
from skill_tools.reports.rule_pages import rule_pages

pytestmark = pytest.mark.slow


def call(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that finds no checkout: only what is installed counts."""
    command, environment = [str(word) for word in words], {**os.environ}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = call(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, root(), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def offload(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `offload` command of an empty environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv")
    assert call(sys.executable, "-m", "venv", folder, cwd=folder).returncode == 0
    done = call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "offload"


def test_it_carries_the_facts_and_nothing_for_contributors(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("SKILL.md", "card.yaml", "schema/findings.schema.json", "schema/card.schema.json"):
        assert f"skill_tools/_bundle/{name}" in names
    for path in (root() / "skill_tools" / "knowledge").rglob("*.*"):
        if path.suffix in {".yaml", ".json", ".txt"}:
            assert path.relative_to(root()).as_posix() in names
    pages = {name.rpartition("/")[2] for name in names if name.startswith("skill_tools/_bundle/docs/rules/")}
    assert pages == set(rule_pages())
    assert not [name for name in names if name.startswith(("tests/", "evals/", "docs/"))]


@pytest.mark.slow
def test_lint_works(offload: Path, tmp_path: Path) -> None:
    shutil.copy(root() / "examples" / "broken_bridge.yaml", tmp_path)
    done = call(offload, "lint", "broken_bridge.yaml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "la-pp" in done.stdout


def test_plan_works(offload: Path, tmp_path: Path) -> None:
    shutil.copy(root() / "examples" / "good_bridge.yaml", tmp_path)
    words = ("plan", "good_bridge.yaml", "--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu-memory", "80GB")
    done = call(offload, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GiB" in done.stdout


def test_explain_works(offload: Path, tmp_path: Path) -> None:
    done = call(offload, "explain", "la-pp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Pipeline parallelism" in done.stdout


def test_card_needs_a_checkout_and_says_so(offload: Path, tmp_path: Path) -> None:
    done = call(offload, "card", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "is no checkout" in done.stderr
    assert "Traceback" not in done.stderr
