# SPDX-License-Identifier: Apache-2.0
"""Unpacks releases of Accelerate from PyPI, each into a folder of its own, beside their imports except torch.

python tests/judges/accelerate/fetch.py 1.13.0 1.15.0
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "build" / "accelerate"
EXTRAS = FOLDER / "dependencies"
EXTRA_PACKAGES = ["psutil", "pyyaml", "packaging", "huggingface_hub", "safetensors"]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def trees() -> list[Path]:
    """Return the folders of all unpacked releases, oldest first."""
    return sorted(path.parent for path in FOLDER.glob("*/accelerate"))


def fetch(version: str) -> None:
    """Download one wheel and unpack its package."""
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(
            [*PIP, "download", "--no-deps", "--dest", downloads, f"accelerate=={version}"], check=True
        )
        (wheel,) = Path(downloads).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(FOLDER / version)


def main() -> None:
    """Fetch the releases that are not there yet."""
    if not EXTRAS.is_dir():
        subprocess.run([*PIP, "install", "--target", str(EXTRAS), *EXTRA_PACKAGES], check=True)
    for version in sys.argv[1:]:
        if not (FOLDER / version).is_dir():
            fetch(version)


if __name__ == "__main__":
    main()
