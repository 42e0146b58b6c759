"""Compares the version that the package, its metadata and SKILL.md each state.

Three places must name it, because three readers look there: pip, Python and the skill's installer.
"""

import re
import tomllib
from pathlib import Path

import yaml

import skill_tools


def version_problems(root: Path) -> list[str]:
    """Return one line a place whose version differs from `skill_tools.__version__`."""
    expected = skill_tools.__version__
    found = {
        "pyproject.toml project.version": _pyproject(root / "pyproject.toml"),
        "SKILL.md metadata.version": _frontmatter(root / "SKILL.md").get("metadata", {}).get("version"),
    }
    return [
        f"{place} is {version}, skill_tools.__version__ is {expected}"
        for place, version in found.items()
        if version != expected
    ]


def _pyproject(path: Path) -> str:
    with path.open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def _frontmatter(path: Path) -> dict[str, dict[str, str]]:
    match = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
    return yaml.safe_load(match[1]) if match else {}
