# SPDX-License-Identifier: Apache-2.0
"""A maintainer's settings fit the project: workflows name existing files, on each promised Python."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.name: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOWS[name])["jobs"]
    return found


def test_each_python_that_is_promised_is_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    promised = [
        "3." + each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)
    ]
    assert jobs("test.yml")["fast"]["strategy"]["matrix"]["python"] == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_workflows_call_what_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    called = {word for text in WORKFLOWS.values() for word in re.findall(r"run: make ([a-z-]+)", text)}
    assert {"test", "test-all", "docs", "skill"} <= called <= set(targets)


def test_only_the_job_that_publishes_may() -> None:
    """Trusted publishing needs a token of the workflow, and no other job has one for PyPI."""
    release = jobs("release.yml")
    publishing = [name for name, job in release.items() if "pypi-publish" in str(job["steps"])]
    assert publishing == ["publish"]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert release["publish"]["environment"] == "pypi"
    for name, text in WORKFLOWS.items():
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, name
        assert "secrets." not in text, name


def test_the_skill_is_signed_scanned_and_published_as_the_page_says_that_it_is_verified() -> None:
    build, release = (jobs("release.yml")[name] for name in ("build", "release"))
    assert build["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    steps = [str(step.get("run") or step.get("with")) for step in build["steps"]]
    order = [
        "make skill",
        "model_signing sign sigstore",
        "skill-scanner scan",
        "build/skill/skill.oms.sig\\n",
    ]
    places = [max(index for index, step in enumerate(steps) if words in step) for words in order]
    assert places == sorted(places)
    assert "gh release create" in str(release["steps"])
    assert "dist/* skill/*" in str(release["steps"])
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    assert "gh attestation verify cpu-offloading.zip" in page
    assert "workflows/release.yml@refs/tags/TAG" in page


def test_forms_ask_for_what_diagnose_needs() -> None:
    """A log, the configuration, the releases and the machine; ids are unique, and forms valid by GitHub's rules."""
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        if path.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(form), path.name
        ids = [each["id"] for each in form["body"]]
        assert len(ids) == len(set(ids)), path.name
        assert all(
            each["type"] in {"textarea", "input"} and each["attributes"]["label"] for each in form["body"]
        )
    asked = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "failed_run.yml").read_text("utf-8"))[
        "body"
    ]
    required = {each["id"] for each in asked if each.get("validations", {}).get("required")}
    assert {"log", "configuration", "releases", "machine", "diagnosis"} <= required
