# SPDX-License-Identifier: Apache-2.0
"""Fetches released LLaMA-Factory versions, and releases of Transformers below them, into build/judges/llama_factory.

    python tests/judges/llama_factory/fetch.py 0.9.0 0.9.3 0.9.5

torch is the project's own. Called by `make test-llama-factory`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "judges" / "llama_factory"
COMMON = [
    "omegaconf==2.3.0", "safetensors", "regex", "tqdm", "requests", "httpx", "pyyaml", "packaging", "filelock",
    "psutil", "typer",
]  # fmt: skip
# By the release of Transformers: packages that would bring torch along, or need other releases than the next one.
BESIDE = {
    "4.51.3": (["accelerate==1.6.0"], ["tokenizers==0.21.1", "huggingface_hub==0.30.2"]),
    "4.57.3": (["accelerate==1.13.0"], ["tokenizers==0.22.1", "huggingface_hub==0.36.0"]),
    "5.5.0": (["accelerate==1.13.0"], ["tokenizers==0.22.2", "huggingface_hub>=1.5,<2"]),
}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    """Fetch the releases that are not there yet."""
    for transformers, (alone, others) in BESIDE.items():
        target = FOLDER / f"transformers-{transformers}"
        if not target.is_dir():
            install = [*PIP, "install", "--target", str(target)]
            subprocess.run([*install, "--no-deps", f"transformers=={transformers}", *alone], check=True)
            subprocess.run([*install, *COMMON, *others], check=True)
    for version in sys.argv[1:]:
        if not (FOLDER / version).is_dir():
            fetch(version)


def fetch(version: str) -> None:
    """Download one wheel, and unpack its package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*PIP, "download", "--no-deps", "--dest", folder, f"llamafactory=={version}"], check=True
        )
        (archive,) = Path(folder).iterdir()
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(
                FOLDER / version, [name for name in wheel.namelist() if name.startswith("llamafactory/")]
            )


if __name__ == "__main__":
    main()
