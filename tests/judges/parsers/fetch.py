# SPDX-License-Identifier: Apache-2.0
"""Fetches the parsers that frameworks read configurations with, release by release, into build/parsers.

    python tests/judges/parsers/fetch.py

PyYAML, OmegaConf, Hydra, tyro and the libraries of Axolotl's command are installed, each into a folder of its own; of
Axolotl, Megatron Bridge, torchtitan and torchtune the package is unpacked, because their dependencies are a training
stack. The releases of Megatron-LM, NeMo-RL, ms-swift, prime-rl and verl are those of tests/judges/rl/fetch.py. Called
by `make test-parsers`.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "parsers"
INSTALLED = {
    "PyYAML": ["6.0.2", "6.0.3", "6.0.4"],
    "omegaconf": ["2.3.0", "2.3.1", "2.4.0"],
    "hydra-core": ["1.3.2", "1.3.8"],
    "antlr4-python3-runtime": ["4.9.3"],
    "packaging": ["25.0"],
    "fire": ["0.7.1"],
    "termcolor": ["3.1.0"],
    "addict": ["2.4.0"],
    "click": ["8.1.8"],
    "tyro": ["1.0.17"],
    "typeguard": ["4.6.1"],
    "docstring_parser": ["0.18.0"],
}
UNPACKED = {
    "axolotl": ["0.18.0", "0.21.0"],
    "megatron-bridge": ["0.6.2"],
    "torchtitan": ["0.2.0", "0.2.2", "0.3.0"],
    "torchtune": ["0.5.0", "0.6.1"],
}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    """Fetch the releases that are not there yet."""
    for name, versions in INSTALLED.items():
        for version in versions:
            target = FOLDER / f"{name}-{version}"
            if not target.is_dir():
                install = [*PIP, "install", "--no-deps", "--target", str(target), f"{name}=={version}"]
                subprocess.run(install, check=True)
    for name, versions in UNPACKED.items():
        for version in versions:
            if not (FOLDER / f"{name}-{version}").is_dir():
                unpack(name, version, FOLDER / f"{name}-{version}")


def unpack(name: str, version: str, target: Path) -> None:
    """Download one release, as a wheel or else as a source archive, and unpack its package."""
    with tempfile.TemporaryDirectory() as folder:
        download = [*PIP, "download", "--no-deps", "--ignore-requires-python", "--dest", folder]
        subprocess.run([*download, f"{name}=={version}"], check=True)
        (archive,) = Path(folder).iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target)
            return
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                inside = member.name.partition("/src/")[2]
                content = source.extractfile(member) if inside else None
                if content is not None:
                    path = target / inside
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())


if __name__ == "__main__":
    main()
