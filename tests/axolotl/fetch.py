# SPDX-License-Identifier: Apache-2.0
"""Fetches the schemas of released Axolotl versions, and the two libraries they need, into build/axolotl.

    python tests/axolotl/fetch.py 0.18.0 0.19.0

The releases themselves are not installed: their dependencies are a whole training stack, and the schemas need
none of it, nor the Python that newer releases ask for. From each distribution only the package `axolotl` is
unpacked. Called by `make test-axolotl`.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "axolotl"
# The distribution to install, and the package that shows its presence.
DEPENDENCIES = {"pydantic==2.12.5": "pydantic", "pillow": "PIL", "addict": "addict"}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    """Fetch the releases that are not there yet."""
    there = FOLDER / "dependencies"
    missing = [requirement for requirement, package in DEPENDENCIES.items() if not (there / package).is_dir()]
    if missing:
        subprocess.run([*PIP, "install", "--target", str(there), *missing], check=True)
    for version in sys.argv[1:]:
        if not (FOLDER / version).is_dir():
            fetch(version)


def fetch(version: str) -> None:
    """Download one release, as a wheel or else as a source archive, and unpack its package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *PIP,
                "download",
                "--no-deps",
                "--ignore-requires-python",
                "--dest",
                folder,
                f"axolotl=={version}",
            ],
            check=True,
        )
        (archive,) = Path(folder).iterdir()
        if archive.suffix == ".whl":
            unpack_wheel(archive, FOLDER / version)
        else:
            unpack_source(archive, FOLDER / version)


def unpack_wheel(archive: Path, target: Path) -> None:
    """Unpack the members of `axolotl/`."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(target, [name for name in wheel.namelist() if name.startswith("axolotl/")])


def unpack_source(archive: Path, target: Path) -> None:
    """Unpack the files of `axolotl-VERSION/src/axolotl/`, without the leading folders."""
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            package = member.name.partition("/src/")[2]
            content = source.extractfile(member) if package.startswith("axolotl/") else None
            if content is not None:
                path = target / package
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


if __name__ == "__main__":
    main()
