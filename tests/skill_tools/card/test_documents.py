# SPDX-License-Identifier: Apache-2.0
"""A page may only name existing files, commands and names."""

from pathlib import Path

import pytest

from skill_tools.card.documents import page_problems

COMMANDS = {"lint": "usage: lint [--format FORMAT] FILE", "card": "usage: card {check,render}"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "faq.md").write_text("# FAQ\n\n## Is it `slow`?\n", encoding="utf-8")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "run.yaml").write_text("model: {}\n", encoding="utf-8")
    (tmp_path / "Makefile").write_text("test: setup\n\techo\n", encoding="utf-8")
    return tmp_path


def problems(tree: Path, text: str) -> list[str]:
    page = tree / "README.md"
    page.write_text(text, encoding="utf-8")
    return page_problems(page, tree, COMMANDS)


@pytest.mark.parametrize(
    "text",
    [
        "[faq](docs/faq.md), [slow](docs/faq.md#is-it-slow), [web](https://example.org/x.md)",
        "[here](#title)\n\n# Title",
        "`docs/faq.md` and `docs/*.md` and `megatron/core/file.py` and `a/b`",
        "`offload lint FILE`",
        "```bash\noffload lint --format json examples/run.yaml | head  # comment\n```",
        "```bash\npython3 skill_tools lint \\\n  --format json mine/run.yaml && make test\n```",
        "```console\n$ offload lint run.yaml\nrun.yaml:1: error --nonsense docs/gone.md\n```",
        "```text\noffload gone --flag\n```",
        "---\nname: x\ndescription: '[a](gone.md)'\n---\n\ntext",
    ],
)
def test_a_page_that_names_what_exists(tree: Path, text: str) -> None:
    assert problems(tree, text) == []


def test_what_is_made_need_not_be_there_where_something_else_is_made(tree: Path) -> None:
    (tree / "build").mkdir()
    assert problems(tree, "`build/site`\n\n```bash\ncat build/log\n```") == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](docs/gone.md)", "link to docs/gone.md: no such file"),
        ("![gone](docs/gone.svg)", "link to docs/gone.svg: no such file"),
        ("[gone](docs/faq.md#gone)", "link to docs/faq.md#gone: no such heading"),
        ("| a |\n|---|\n| [gone](gone.md) |", "link to gone.md: no such file"),
        ("`docs/gone.md`", "names docs/gone.md: no such file"),
        ("`docs/gone*.md`", "names docs/gone*.md: no such file"),
        ("`offload gone FILE`", "names the command gone: no such command"),
        ("```bash\noffload lint --fast x.yaml\n```", "names lint --fast: no such option"),
        ("```bash\npython3 skill_tools gone\n```", "names the command gone: no such command"),
        ("```sh\ncd x && offload gone\n```", "names the command gone: no such command"),
        ("```console\n$ offload lint examples/gone.yaml\n```", "names examples/gone.yaml: no such file"),
        ("```bash\nmake gone\n```", "names make gone: no such target"),
    ],
)
def test_a_page_that_names_what_does_not_exist(tree: Path, text: str, complaint: str) -> None:
    assert problems(tree, text) == [f"README.md: {complaint}"]
