# SPDX-License-Identifier: Apache-2.0
"""Unpacks releases of packages from PyPI, each into a folder of its own, without installing any of them.

    python tests/judges/messages/fetch.py deepspeed==0.18.3 accelerate==1.12.0

torch comes as its wheel for macOS, which has the same Python and the same texts in a tenth of the size.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "build" / "messages"
_SOURCES = frozenset(("deepspeed", "transformer-engine-torch"))  # without wheels, or without Python in them

_SMALL = ["--python-version", "3.12", "--platform", "macosx_11_0_arm64", "--platform", "macosx_14_0_arm64"]


def tree(package: str, release: str) -> Path:
    """Return the folder of one release, which holds its packages."""
    return ROOT / package / release


def fetch(package: str, release: str) -> None:
    """Download one release and unpack it."""
    form = ["--no-binary", ":all:"] if package in _SOURCES else ["--only-binary", ":all:"]
    form += _SMALL if package == "torch" else []
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form]
    with tempfile.TemporaryDirectory() as downloads:
        quiet = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "--dest", downloads, f"{package}=={release}"], check=True, env=quiet)
        (archive,) = Path(downloads).iterdir()
        target = tree(package, release)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(target)
            return
        with tarfile.open(archive) as packed, tempfile.TemporaryDirectory() as unpacked:
            packed.extractall(unpacked, filter="data")
            (inside,) = Path(unpacked).iterdir()
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", str(inside), str(target)], check=True)


def main(releases: list[str]) -> None:
    for each in releases:
        package, _, release = each.partition("==")
        if not tree(package, release).is_dir():
            fetch(package, release)


if __name__ == "__main__":
    main(sys.argv[1:])
