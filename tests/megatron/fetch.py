# SPDX-License-Identifier: Apache-2.0
"""Unpacks megatron-core releases from PyPI, each into a folder of its own, without installing any of them.

    python tests/megatron/fetch.py 0.13.1 0.16.1 newest extras

`newest` is whatever PyPI has, also where its wheel is for a later Python than this one: unpacking asks for none.
`extras` are imported beside torch by releases from 0.18 on, and by the command line's code of a source tree.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".megatron-core"
EXTRAS = ROOT / "extras"
EXTRA_PACKAGES = ["triton", "six", "regex", "pydantic"]
# The Pythons that wheels are built for: the newest ones for the first, those of 0.13 and before not yet for it.
PYTHONS = ["3.13", "3.11"]
PLATFORMS = ["any", "manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64"]


def tree_of(version: str) -> Path:
    """Return the folder of one unpacked release; ends the program when it is not there."""
    tree = ROOT / version
    if not (tree / "megatron").is_dir():
        raise SystemExit(f"{version} is not unpacked; run python tests/megatron/fetch.py {version}")
    return tree


def trees() -> list[Path]:
    """Return the folders of all unpacked releases."""
    return sorted(path.parent for path in ROOT.glob("*/megatron"))


def fetch(requirement: str) -> None:
    """Download one wheel and unpack it into a folder named after its version."""
    with tempfile.TemporaryDirectory() as downloads:
        if not any(downloaded(requirement, python, downloads) for python in PYTHONS):
            raise SystemExit(
                f"no wheel of {requirement} for Python {' or '.join(PYTHONS)}; pip's output is above"
            )
        (wheel,) = Path(downloads).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(ROOT / wheel.name.split("-")[1])


def downloaded(requirement: str, python: str, folder: str) -> bool:
    """Try to download the wheel for one Python, and return whether there is one."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    return subprocess.run([*command, "--dest", folder, requirement], check=False).returncode == 0


def fetch_extras() -> None:
    """Install the extras into a folder of their own, once."""
    if not EXTRAS.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(EXTRAS),
            *EXTRA_PACKAGES,
        ]
        subprocess.run(command, check=True)


def main(wanted: list[str]) -> None:
    for word in wanted:
        if word == "extras":
            fetch_extras()
        elif word == "newest":
            fetch("megatron-core")
        elif not (ROOT / word).is_dir():
            fetch(f"megatron-core=={word}")
    if any(tuple(map(int, tree.name.split(".")[:2])) >= (0, 18) for tree in trees()):
        fetch_extras()


if __name__ == "__main__":
    main(sys.argv[1:])
