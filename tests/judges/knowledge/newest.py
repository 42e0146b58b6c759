# SPDX-License-Identifier: Apache-2.0
"""Compares the newest published release of each framework with its record, and prints one table.

    python tests/judges/knowledge/newest.py [PACKAGE[==RELEASE] ... | recorded]        (make knowledge)

pip fetches each package without its requirements into build/knowledge, and the archive of a tag is fetched where pip
has none; nothing of it is installed or run. `recorded` stands for each release that is recorded of each. A row has the
package's last recorded release, its published one, the number of offload settings and defaults that differ from the
records, and the number of lost quotes of rules and messages. The exit code is 1 if a row has one; settings and defaults
count in the newest release alone. Below stand the changes of other projects, from `upstream.yaml`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "knowledge"
RELEASES = ROOT / "skill_tools" / "knowledge" / "releases.yaml"
WATCHED = ROOT / "skill_tools" / "knowledge" / "upstream.yaml"
PACKAGES = (
    "transformers", "trl", "peft", "accelerate", "deepspeed", "axolotl", "megatron-core", "megatron-bridge",
    "torchtune", "torchtitan", "llamafactory", "ms-swift", "verl", "lightning", "nemo-automodel", "simpletuner",
    "oumi", "veomni", "maxtext", "unsloth", "openrlhf", "torchao", "skyrl", "areal",
)  # fmt: skip
# Packages missing in the index, or with more in their repositories than in their wheels: the repository, and the tag of
# a release.
TAGS = {
    "megatron-core": ("NVIDIA/Megatron-LM", "core_v{}"), "megatron-bridge": ("NVIDIA-NeMo/Megatron-Bridge", "v{}"),
    "nemo-rl": ("NVIDIA-NeMo/RL", "v{}"), "prime-rl": ("PrimeIntellect-ai/prime-rl", "v{}"),
    "slime": ("THUDM/slime", "v{}"), "miles": ("radixark/miles", "v{}"),
    "mindspeed-llm": ("Ascend/MindSpeed-LLM", "v{}"), "musubi-tuner": ("kohya-ss/musubi-tuner", "v{}"),
    "sd-scripts": ("kohya-ss/sd-scripts", "v{}"), "roll": ("alibaba/ROLL", "v{}"),
    "xtuner": ("InternLM/xtuner", "v{}"), "onetrainer": ("Nerogar/OneTrainer", "{}"),
    "ai-toolkit": ("ostris/ai-toolkit", "{}"), "torchtune": ("pytorch/torchtune", "v{}"),
    "transformer-engine": ("NVIDIA/TransformerEngine", "v{short}"), "areal": ("inclusionAI/AReaL", "v{}"),
}  # fmt: skip
# The commits of the two that tag no release.
COMMITS = {
    "2026.7.5": "6fd9b7f6e559f05b29bff202b655be67a6c68d8f",
    "2026.8.19": "23df3832e8f213d64c337e39f9365ba46e99fed0",
    "0.12.26": "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350",
}
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
    """Return the archive of a release's tag, else pip's wheel or sources; None without any."""
    if name in TAGS and (archive := tagged(name, release)):
        return archive
    if name not in PACKAGES:
        return None
    stem = re.sub(r"[-_.]+", "[-_.]", name)
    for path in sorted(FOLDER.glob("*")):
        if re.match(rf"{stem}-{re.escape(release)}([-.]|$)", path.name, re.IGNORECASE):
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


def tagged(name: str, release: str) -> Path | None:
    """Return the archive of a release's tag; None where there is none."""
    repository, form = TAGS[name]
    path = FOLDER / f"{name}-{release}.tag.tar.gz"
    tag = form.format(COMMITS.get(release, release), short=release.removesuffix(".0"))
    try:
        if not path.exists():
            with urllib.request.urlopen(f"https://codeload.github.com/{repository}/tar.gz/{tag}") as answer:
                path.write_bytes(answer.read())
    except OSError:
        return None
    return path


def recorded() -> Iterator[str]:
    """Yield each release of a package above that is recorded."""
    known = yaml.safe_load(RELEASES.read_text(encoding="utf-8"))["known"]
    yield from (
        f"{name}=={release}"
        for name in dict.fromkeys((*PACKAGES, *TAGS))
        for release in released(known[name])
    )


def released(known: list[str]) -> list[str]:
    """Return the releases among those that are known, without snapshots of a branch."""
    return [release for release in known if "dev" not in release]


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
    known = yaml.safe_load(RELEASES.read_text(encoding="utf-8"))["known"]
    asked = (
        [*recorded()]
        if sys.argv[1:] == ["recorded"]
        else sys.argv[1:] or [*dict.fromkeys((*PACKAGES, *TAGS))]
    )
    for wanted in asked:
        name, _, release = wanted.partition("==")
        release = release or (newest(name) if name in PACKAGES else released(known[name])[-1]) or ""
        path = fetched(name, release) if release else None
        if path is None:
            print(f"{name:<18}{'':<16}{release:<14}not to be had", flush=True)
            continue
        found = compared(name, release, path)
        if "refused" in found:
            print(f"{name:<18}{'':<16}{found['release']:<14}{found['refused']}")
            continue
        counts = [len(found[part]) for part in ("unknown", "defaults", "lost")]
        until = found["recorded_until"] or "nothing"
        if release in known.get(name, ()) and release != until:
            counts[:2] = 0, 0
        total += sum(counts)
        print(
            f"{name:<18}{until:<16}{release:<14}{counts[0]:>9}{counts[1]:>9}{counts[2]:>12}",
            flush=True,
        )
        for each in found["unknown"] if counts[0] else ():
            print(f"    not recorded: {each['name']} = {each['now']}")
        for each in found["lost"]:
            print(f"    {each['what']} gone: {each['id']} ({each['ref']})")
    print("\nchanges of other projects, as they were last read:")
    for each in yaml.safe_load(WATCHED.read_text(encoding="utf-8")):
        print(f"    {each['thread']} ({each['seen']}): {each['what']}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
