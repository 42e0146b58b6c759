"""Fetches released LLaMA-Factory versions, and a Transformers for their parser, into build/judges/llama_factory.

    python tests/judges/llama_factory/fetch.py 0.9.0 0.9.3 0.9.5

torch is the project's own. Called by `make test-llama-factory`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "build" / "judges" / "llama_factory"
DEPENDENCIES = [
    "transformers==4.51.3", "accelerate==1.6.0", "tokenizers==0.21.1", "huggingface_hub==0.30.2", "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3", "safetensors", "regex", "tqdm", "requests", "urllib3", "idna", "certifi",
    "charset-normalizer", "filelock", "fsspec", "psutil",
]  # fmt: skip
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    """Fetch what is not there yet."""
    target = FOLDER / "dependencies"
    if not target.is_dir():
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), *DEPENDENCIES], check=True)
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
