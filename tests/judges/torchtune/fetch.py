# SPDX-License-Identifier: Apache-2.0
"""Fetches the recipes of released torchtune versions, and OmegaConf, into build/judges/torchtune.

    python tests/judges/torchtune/fetch.py 0.4.0 0.5.0 0.6.1 0.7.0=https://github.com/pytorch/torchtune

A release that is not on PyPI is taken from a repository: `VERSION=URL`. Nothing is installed: the recipes need a whole
training stack, and the judge runs them without one. Called by `make test-torchtune`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "judges" / "torchtune"
DEPENDENCIES = ["omegaconf==2.3.0"]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
WANTED = ("recipes/", "torchtune/training/_distributed.py")


def main() -> None:
    """Fetch the releases that are not there yet."""
    if not (FOLDER / "dependencies").is_dir():
        subprocess.run([*PIP, "install", "--target", str(FOLDER / "dependencies"), *DEPENDENCIES], check=True)
    for stated in sys.argv[1:]:
        version, _, repository = stated.partition("=")
        if (FOLDER / version).is_dir():
            continue
        if repository:
            clone(repository, FOLDER / version)
        else:
            fetch(version)


def clone(repository: str, target: Path) -> None:
    """Take the newest state of a repository; of its files only the recipes are read."""
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, str(target)], check=True)


def fetch(version: str) -> None:
    """Download one wheel, and unpack its recipes."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "download", "--no-deps", "--dest", folder, f"torchtune=={version}"], check=True)
        (archive,) = Path(folder).iterdir()
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(FOLDER / version, [name for name in wheel.namelist() if name.startswith(WANTED)])


if __name__ == "__main__":
    main()
