# SPDX-License-Identifier: Apache-2.0
"""Fetches releases of transformers, TRL and Accelerate, and the libraries they need, into build/transformers.

    python tests/judges/transformers/fetch.py 5.8.0 5.23.0

Wheels are unpacked, not installed: two releases stand side by side, and torch is the interpreter's own. The series 4
and 5 need different releases of huggingface_hub and tokenizers. Called by `make test-transformers`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "transformers"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
BESIDE = {"trl": "1.16.0", "accelerate": "1.15.0"}
COMMON = [
    "safetensors",
    "httpx",
    "regex",
    "pyyaml",
    "tqdm",
    "requests",
    "packaging",
    "filelock",
    "psutil",
    "typer",
]
DEPENDENCIES = {
    "4": [*COMMON, "huggingface_hub<1", "tokenizers>=0.22,<=0.23.0"],
    "5": [*COMMON, "huggingface_hub>=1.31,<3", "tokenizers>=0.23.1,<0.24"],
}


def main() -> None:
    """Fetch the releases that are not there yet."""
    for name, version in BESIDE.items():
        unpack(name, version, FOLDER / "beside")
    for version in sys.argv[1:]:
        series = version.partition(".")[0]
        target = FOLDER / f"dependencies-{series}"
        if not target.is_dir():
            subprocess.run([*PIP, "install", "--target", str(target), *DEPENDENCIES[series]], check=True)
        unpack("transformers", version, FOLDER / version)


def unpack(name: str, version: str, target: Path) -> None:
    """Download the wheel of one release and unpack it, unless its package is there."""
    if (target / name).is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "download", "--no-deps", "--dest", folder, f"{name}=={version}"], check=True)
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)


if __name__ == "__main__":
    main()
