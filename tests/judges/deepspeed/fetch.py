# SPDX-License-Identifier: Apache-2.0
"""Unpacks DeepSpeed releases from PyPI, each into a folder of its own, without installing any of them.

    python tests/judges/deepspeed/fetch.py 0.17.0 0.19.8

The packages that a release imports beside torch are put into a folder `extras`.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / ".deepspeed"
EXTRAS = ROOT / "extras"
_EXTRAS = (
    "pydantic",
    "hjson",
    "psutil",
    "py-cpuinfo",
    "msgpack",
    "tqdm",
    "einops",
    "ninja",
    "packaging",
    "numpy",
)


def trees() -> list[Path]:
    """Return the folders of all unpacked releases, each called as its version."""
    return sorted(path.parent for path in ROOT.glob("*/deepspeed"))


def fetch(version: str) -> None:
    """Download one source distribution and unpack it into a folder named after its version."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    with tempfile.TemporaryDirectory() as downloads:
        quiet = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "--dest", downloads, f"deepspeed=={version}"], check=True, env=quiet)
        (archive,) = Path(downloads).iterdir()
        with tarfile.open(archive) as packed, tempfile.TemporaryDirectory() as unpacked:
            packed.extractall(unpacked, filter="data")
            (tree,) = Path(unpacked).iterdir()
            ROOT.mkdir(exist_ok=True)
            subprocess.run(["cp", "-r", str(tree), str(ROOT / version)], check=True)


def fetch_extras() -> None:
    """Install the extras into a folder of their own, once."""
    if not EXTRAS.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(EXTRAS)]
        subprocess.run([*pip, *_EXTRAS], check=True)


def main(versions: list[str]) -> None:
    fetch_extras()
    for version in versions:
        if not (ROOT / version).is_dir():
            fetch(version)


if __name__ == "__main__":
    main(sys.argv[1:])
