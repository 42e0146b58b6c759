# SPDX-License-Identifier: Apache-2.0
"""Finds the files that travel with the tools: schemas, the card and SKILL.md.

In a checkout they are in the repository's root, in an installed wheel under `skill_tools/_bundle`. No other module of
`skill_tools` has to know which of the two it runs from. Knowledge files live inside the package and are found with
`knowledge_path`.
"""

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """Return the folder that holds SKILL.md, card.yaml and schema/."""
    installed = _PACKAGE / "_bundle"
    return installed if installed.is_dir() else _PACKAGE.parent


def to_install(extra: str) -> str:
    """Return the command that installs `extra`: from this checkout, or the packages named by an installed wheel."""
    if not (_PACKAGE / "_bundle").is_dir():
        where = "the clone" if (root() / ".git").exists() else "the skill's folder"
        return f"pip install '.[{extra}]' -c constraints.txt in {where}"
    from importlib.metadata import requires

    wanted = [each.partition(";") for each in requires("cpu-offloading") or ()]
    names = (f"'{name.strip()}'" for name, _, when in wanted if f"extra == '{extra}'" in when)
    return f"{sys.executable} -m pip install {' '.join(names)}"


def home() -> str:
    """Return the project's address: the repository that an installed wheel names, else its page on the index."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("cpu-offloading").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    named = (url.partition(", ")[2] for url in urls if url.startswith("Repository, "))
    return next(named, "https://pypi.org/project/cpu-offloading/")


def schema_path(name: str) -> Path:
    """Return the path of one JSON Schema, for example `schema_path("plan")`."""
    return root() / "schema" / f"{name}.schema.json"


def knowledge_path(*parts: str) -> Path:
    """Return the path of one knowledge file, for example `knowledge_path("keys.yaml")`."""
    return _PACKAGE.joinpath("knowledge", *parts)
