# SPDX-License-Identifier: Apache-2.0
"""The pages' commands work: shell lines against a run of their own, Python as it stands."""

import contextlib
import importlib.util
import re
import shlex
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from skill_tools import __version__
from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.commands.lint_settings import nearest_settings
from skill_tools.reports.checkout import pages_with_blocks

ROOT = root()
READERS_FILES = {
    "run.yaml": "examples/good_bridge.yaml",
    "run.sh": "examples/good_megatron_lm.sh",
    "train.log": "evals/files/train_pp.log",
}


@cache
def fences(language: str) -> list[tuple[str, str]]:
    found = []
    for page in pages_with_blocks(ROOT):
        text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for token in MarkdownIt("commonmark").disable("inline").parse(text):
            if token.type == "fence" and token.info == language:
                found.append((page.relative_to(ROOT).as_posix(), token.content))
    return found


def tool_lines() -> list[tuple[str, list[str]]]:
    lines = []
    for page, script in fences("bash"):
        for line in script.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if words[:2] == ["python3", "skill_tools"]:
                lines.append((page, words[2:]))
            elif words[:1] == ["offload"]:
                lines.append((page, words[1:]))
    return lines


def test_the_readme_has_commands_and_a_snippet() -> None:
    assert [page for page, _ in tool_lines()].count("README.md") >= 2
    assert "README.md" in [page for page, _ in fences("python")]


@pytest.mark.parametrize(("page", "words"), tool_lines(), ids=lambda value: str(value)[:60])
def test_a_shell_line_of_a_page_works(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, source in READERS_FILES.items():
        shutil.copy(ROOT / source, name)
    assert main(words) in {0, 1}, f"{page}: {shlex.join(words)}"


def test_settings_of_a_page_are_read(tmp_path: Path) -> None:
    ((page, text),) = fences("toml")
    assert page == "docs/linting.md"
    (tmp_path / "offload.toml").write_text(text, encoding="utf-8")
    assert len(nearest_settings(str(tmp_path), {}).selection.per_file) == 2


def test_yaml_of_a_page_has_its_lines() -> None:
    """A rewrapped block is no YAML, or a text."""
    blocks = fences("yaml")
    assert len(blocks) > 3
    assert all(isinstance(yaml.safe_load(text), dict | list) for _, text in blocks)


@pytest.mark.parametrize(("page", "snippet"), fences("python"), ids=lambda value: str(value)[:40])
def test_a_python_snippet_of_a_page_runs(
    page: str, snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, as somebody copies it: nothing is defined before, and the folder is empty."""
    for module in re.findall(r"^from (transformers|accelerate|peft|lightning)\b", snippet, re.MULTILINE):
        found = importlib.util.find_spec(module)
        # A folder of tests may have its name.
        if found is None or found.origin is None:
            pytest.skip(f"needs {module}: pip install -c constraints.txt '.[reference,trainers]'")
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="reference_impl")  # such as "moves nothing"
        exec(compile(snippet, page, "exec"), {"__name__": "__main__"})
    assert "cpu_offloading" in snippet


def test_the_loop_of_its_page_resumes_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    (loop,) = (
        code for page, code in fences("python") if page == "docs/pytorch-loop.md" and "def train" in code
    )
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(compile(loop, "docs/pytorch-loop.md", "exec"), namespace)

    def run(*parts: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model, batches = torch.nn.Linear(64, 64).bfloat16(), torch.randn(2, 4, 64).bfloat16()
        checkpoint = None
        for steps in parts:
            checkpoint = namespace["train"](model, list(batches), steps, checkpoint)
        return checkpoint

    torch.testing.assert_close(run(3, 3), run(6), rtol=0, atol=0)


def test_the_picture_in_the_readme_is_the_plan_that_it_prints(tmp_path: Path) -> None:
    """Its words and numbers; curves may differ by a matplotlib release."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    (words,) = re.findall(
        r"<!-- run: (plan .*?)(?: \| head -n \d+)? -->", (ROOT / "README.md").read_text("utf-8")
    )
    drawn, shown = tmp_path / "plan.svg", ROOT / "docs" / "figures" / "plan.svg"
    with contextlib.chdir(ROOT):
        assert main([*shlex.split(words), "--plot", str(drawn)]) == 0
    labels = [re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text("utf-8")) for path in (drawn, shown)]
    assert labels[0] == labels[1], f"draw it again: offload {words} --plot docs/figures/plan.svg --force"


def test_the_changelog_is_short_dated_releases() -> None:
    """A line each thing that a user notices, at most 40 a release; the newest release is the package's version."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert sections[0].startswith("[Unreleased]\n")
    heads = [re.match(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)\n", section) for section in sections[1:]]
    assert all(heads), [section.splitlines()[0] for section in sections]
    releases = [tuple(map(int, head[1].split("."))) for head in heads if head]
    assert releases == sorted(set(releases), reverse=True)
    assert ".".join(map(str, releases[0])) == __version__
    long = [line for section in sections for line in section.splitlines() if len(line) > 300]
    assert not long, f"tell a user the change in one line of 300 characters, the docs the rest: {long}"
    many = [section.splitlines()[0] for section in sections if section.count("\n- ") > 40]
    assert not many, f"at most 40 lines a release: {many}"
