# SPDX-License-Identifier: Apache-2.0
"""Fetches the tags and wheels of trainers that the judge asks, into build/NAME/RELEASE.

    python tests/judges/sources/fetch.py [NAME ...]

A release that is there is not fetched again.
"""

import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from judge import FRAMEWORKS, PARSERS

ROOT = Path(__file__).parents[3]
LIBRARIES = (
    "omegaconf==2.3.1",
    "hydra-core==1.3.2",
    "lark==1.3.1",
    "dacite==1.9.2",
    "pydantic==2.12.5",
    "jinja2==3.1.6",
)


def main() -> None:
    """Fetch the releases that are not there yet."""
    install_parsers()
    for module in map(importlib.import_module, sys.argv[1:] or FRAMEWORKS):
        for release in module.RELEASES:
            folder = ROOT / "build" / module.NAME / release
            if folder.is_dir():
                continue
            if hasattr(module, "WHEEL"):
                unpack_wheel(f"{module.WHEEL}=={release}", folder, getattr(module, "PYTHON", "3.11"))
            else:
                unpack(module.REPOSITORY, getattr(module, "TAGS", {}).get(release, f"v{release}"), folder)
            for repository, tag in getattr(module, "ALSO", {}).get(release, ()):
                unpack(repository, tag, folder)


def install_parsers() -> None:
    """Install the parsers that trainers read their settings with, apart from this project's own packages."""
    if not PARSERS.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PARSERS), *LIBRARIES]
        subprocess.run(command, check=True)


def unpack(repository: str, tag: str, target: Path) -> None:
    """Download the archive of a tag or commit, and unpack its text without the leading folder."""
    with urllib.request.urlopen(f"https://codeload.github.com/{repository}/tar.gz/{tag}") as answer:
        data = io.BytesIO(answer.read())
    with tarfile.open(fileobj=data) as archive:
        for member in archive.getmembers():
            path = target / member.name.partition("/")[2]
            content = (
                archive.extractfile(member) if member.isfile() and path.suffix in (".py", ".toml") else None
            )
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def unpack_wheel(wanted: str, target: Path, python: str) -> None:
    """Download a wheel without its requirements, and unpack the package that is in it, wherever it lies there."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            python,
            "--dest",
            folder,
        ]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith((".py", ".yml")):
                    path = target / name.rpartition(".data/purelib/")[2]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(wheel.read(name))


if __name__ == "__main__":
    main()
