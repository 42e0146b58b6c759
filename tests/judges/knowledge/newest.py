# SPDX-License-Identifier: Apache-2.0
"""Compares the newest published release of each framework with its record, and prints one table.

    python tests/judges/knowledge/newest.py [PACKAGE[==RELEASE] ...]        (make knowledge)

pip fetches each package without its requirements into build/knowledge; nothing of it is installed or run. A row says
until which release the package is recorded, which one is published, how many offload settings and defaults are not as
recorded, and how many quotes of rules and messages are gone. The exit code is 1 if any row has one. Below stand the
changes of other projects that `upstream.yaml` says to watch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "knowledge"
WATCHED = ROOT / "skill_tools" / "knowledge" / "upstream.yaml"
PACKAGES = (
    "transformers", "trl", "peft", "accelerate", "deepspeed", "axolotl", "megatron-core", "megatron-bridge",
    "torchtune", "torchtitan", "llamafactory", "ms-swift", "verl", "lightning", "nemo-automodel", "simpletuner",
    "oumi", "veomni", "maxtext", "unsloth", "openrlhf", "torchao", "skyrl", "areal",
)  # fmt: skip
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PYTHON = "3.12"  # some releases have no wheel for an older one


def newest(name: str) -> str | None:
    """Return the newest release that pip knows of, for whatever Python."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "index",
        "versions",
        name,
        "--ignore-requires-python",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"(?m)^\S+ \((\S+)\)", done.stdout)
    return found[1] if done.returncode == 0 and found else None


def fetched(name: str, release: str) -> Path | None:
    """Return the file that pip has of a release: a wheel, else a source archive; None where there is none."""
    stem = re.sub(r"[-_.]+", "[-_.]", name)
    for path in sorted(FOLDER.glob("*")):
        if re.match(rf"{stem}-{re.escape(release)}[-.]", path.name, re.IGNORECASE):
            return path
    wheel = ["--only-binary", ":all:", "--python-version", PYTHON]
    source = ["--no-binary", ":all:", "--no-build-isolation", "--ignore-requires-python"]
    with tempfile.TemporaryDirectory() as folder:
        for form in (wheel, source):
            command = [*PIP, "download", "--no-deps", *form, "--dest", folder, f"{name}=={release}"]
            done = subprocess.run(
                command, capture_output=True, check=False, env={**os.environ, "DS_BUILD_OPS": "0"}
            )
            if done.returncode == 0:
                (path,) = Path(folder).iterdir()
                return Path(shutil.move(path, FOLDER / path.name))
    return None


def compared(name: str, release: str, path: Path) -> dict[str, Any]:
    """Return the report of one release."""
    command = ["knowledge", "diff", f"{name}=={release}", str(path), "--format", "json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "skill_tools"), *command], capture_output=True, text=True, check=False
    )
    if done.returncode == 2:
        return {"release": release, "refused": done.stderr.strip()}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the table; return the exit code."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(
        f"{'package':<18}{'recorded until':<16}{'published':<14}{'settings':>9}{'defaults':>9}{'quotes gone':>12}"
    )
    total = 0
    for wanted in sys.argv[1:] or PACKAGES:
        name, _, release = wanted.partition("==")
        release = release or newest(name) or ""
        path = fetched(name, release) if release else None
        if path is None:
            print(f"{name:<18}not published where pip looks")
            continue
        found = compared(name, release, path)
        if "refused" in found:
            print(f"{name:<18}{'':<16}{found['release']:<14}{found['refused']}")
            continue
        counts = [len(found[part]) for part in ("unknown", "defaults", "lost")]
        total += sum(counts)
        until = found["recorded_until"] or "nothing"
        print(f"{name:<18}{until:<16}{found['release']:<14}{counts[0]:>9}{counts[1]:>9}{counts[2]:>12}")
        for each in found["unknown"]:
            print(f"    not recorded: {each['name']} = {each['now']}")
        for each in found["lost"]:
            print(f"    {each['what']} gone: {each['id']} ({each['ref']})")
    print("\nnot merged when they were last read, and would change what is recorded:")
    for each in yaml.safe_load(WATCHED.read_text(encoding="utf-8")):
        print(f"    {each['thread']} ({each['seen']}): {each['what']}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
