# SPDX-License-Identifier: Apache-2.0
"""The skill as its readers get it: valid frontmatter, small enough, one version, true to its card."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import skill_tools
from skill_tools.bundle import root
from skill_tools.reports.rule_folder import rule_pages

ROOT = root()
SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
FRONTMATTER = yaml.safe_load(SKILL.split("---\n")[1])
CHARACTERS_A_TOKEN = 4


def heading(name: str) -> int:
    return SKILL.index(f"\n## {name}\n")


def test_it_has_the_six_fields_of_the_format_and_no_other() -> None:
    assert set(FRONTMATTER) == {
        "name",
        "description",
        "license",
        "compatibility",
        "metadata",
        "allowed-tools",
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make skill` for an agent."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, whose files the bundle consists of")
    folder = tmp_path_factory.mktemp("skill") / "cpu-offloading"
    skill_bundle()["bundle"](folder)
    return folder


def skill_bundle() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "skill_bundle.py"))


def test_the_validator_accepts_it(bundle: Path) -> None:
    validator = Path(sys.executable).with_name("agentskills")
    if not validator.is_file():
        pytest.skip("needs skills-ref: pip install -c constraints.txt '.[test]'")
    done = subprocess.run([validator, "validate", str(bundle)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_an_agent_installs_is_slim(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} & {"tests", "benchmarks", "evals", "findings"} == set()
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 7_200_000
    dead = [
        f"{page.relative_to(bundle)}: {link}"
        for page in bundle.rglob("*.md")
        for link in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not dead, "\n".join(dead)


@pytest.mark.slow
def test_its_zip_file_is_slim(bundle: Path) -> None:
    assert skill_bundle()["zipped"](bundle).stat().st_size < 2_080_000


def test_its_commands_work_as_written_from_a_folder_of_the_user(bundle: Path, tmp_path: Path) -> None:
    """An agent puts the skill's folder in the place of the variable, as Claude Code does, or as SKILL.md says."""
    shutil.copy(ROOT / "examples" / "good_axolotl.yaml", tmp_path / "FILE.yaml")
    shutil.copy(ROOT / "evals" / "files" / "train_pp.log", tmp_path / "LOG")
    table = SKILL[heading("Purpose") : heading("Decision table")]
    lines = re.findall(r"`python3 (\$\{CLAUDE_SKILL_DIR\}/skill_tools [^`]+)`", table)
    assert len(lines) >= 6
    for line in lines:
        if line.endswith("verify"):  # trains for a minute
            continue
        words = line.replace("${CLAUDE_SKILL_DIR}", str(bundle)).replace("FILE", "FILE.yaml")
        done = subprocess.run(
            [sys.executable, *words.replace("RULE", "la-pp").split()],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in {0, 1}, f"{line}: {done.stderr}"


def test_what_only_a_checkout_can_do_is_refused(bundle: Path) -> None:
    command = [sys.executable, str(bundle / "skill_tools"), "card", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "is no checkout" in done.stderr) == (2, True), done.stderr


def test_no_python_but_this_tool_is_approved() -> None:
    tools = re.findall(r"\w+(?:\([^)]*\))?", FRONTMATTER["allowed-tools"])
    shells = [tool for tool in tools if tool.startswith("Bash")]
    # Reading commands; not `watch`, which runs any program.
    reading = ("lint", "plan", "diagnose", "explain")
    tool = ("python3 ${CLAUDE_SKILL_DIR}/skill_tools", "offload")
    assert shells == [f"Bash({program} {command} *)" for program in tool for command in reading]
    assert not {"Edit", "Write", "Bash", "WebFetch"} & set(tools)


def test_its_tools_are_its_own(bundle: Path) -> None:
    """As an agent runs them: uninstalled, from another folder. A plan needs the arithmetic beside the tools."""
    words = (
        "plan",
        "--model",
        "llama-3-8b",
        "--gpus",
        "1",
        "--gpu-memory",
        "24GiB",
        "--framework",
        "pytorch",
    )
    command = [sys.executable, "-v", str(bundle / "skill_tools"), *words]
    done = subprocess.run(command, cwd=bundle / "schema", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GPU: " in done.stdout
    for package in ("skill_tools", "offload_arithmetic"):
        assert str(bundle / package / "__init__") in done.stderr, "the copy is not the running one"


def test_an_agent_can_keep_it_in_mind() -> None:
    assert len(SKILL.splitlines()) <= 200
    assert len(SKILL) / CHARACTERS_A_TOKEN < 3000


def test_the_decisions_and_the_limits_are_on_the_first_screen() -> None:
    assert SKILL[: heading("Instructions")].count("\n") <= 66
    assert heading("Decision table") < heading("Hard limits") < heading("Instructions")


@pytest.mark.parametrize(
    "section",
    [
        "Purpose",
        "Instructions",
        "Examples",
        "Troubleshooting",
        "Limitations",
        "Prerequisites",
        "References",
    ],
)
def test_it_has_the_sections_that_readers_look_for(section: str) -> None:
    assert heading(section)


def test_the_description_says_when_to_use_it_to_everyone() -> None:
    description = FRONTMATTER["description"]
    assert len(description) <= 1024
    assert "Use when" in description
    assert not re.search(r"\b(I|you|your|my)\b|[<>]", description)
    assert " --- " not in description


def test_every_place_states_the_same_version() -> None:
    plugin = json.loads((ROOT / ".claude-plugin/marketplace.json").read_text(encoding="utf-8"))["plugins"][0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    card = (ROOT / "skill-card.md").read_text(encoding="utf-8")
    stated = {FRONTMATTER["metadata"]["version"], plugin["version"], citation["version"]}
    assert stated == {skill_tools.__version__}
    assert f"## Skill version\n\n{skill_tools.__version__}\n" in card


def test_the_plugin_is_this_folder() -> None:
    market = json.loads((ROOT / ".claude-plugin/marketplace.json").read_text(encoding="utf-8"))
    assert [(plugin["name"], plugin["source"], plugin["skills"]) for plugin in market["plugins"]] == [
        (FRONTMATTER["name"], "./", ["./"])
    ]
    assert not (ROOT / ".claude-plugin/plugin.json").exists()


def test_no_text_reads_like_a_personal_address() -> None:
    """A symbol joined to a file by an at sign is taken for an e-mail address by scanners of personal data."""
    author = FRONTMATTER["metadata"]["author"].partition("<")[2].rstrip(">")
    kept = [ROOT / "SKILL.md", ROOT / "card.yaml", *ROOT.glob("docs/*.md")]
    texts = {page.name: page.read_text(encoding="utf-8") for page in kept} | rule_pages()
    for name, text in texts.items():
        assert not re.search(r"[\w.]+@[\w-]+\.\w+", text.replace(author, "")), name
