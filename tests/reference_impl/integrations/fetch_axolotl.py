# SPDX-License-Identifier: Apache-2.0
"""Makes an environment with a release of Axolotl that trains on a CPU, in build/axolotl-train/VERSION.

    python tests/reference_impl/integrations/fetch_axolotl.py 0.20.0 0.21.0

The release itself is installed without its dependencies, most of which are for GPUs or services, and whatever Python
it asks for. Of its pinned packages, the ones imported by training are installed at the pin. Called by `make
test-trainers-axolotl`.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "axolotl-train"
# Imports of `axolotl.train`, by the names of its metadata.
NEEDED = {
    "accelerate", "addict", "art", "axolotl-contribs-lgpl", "axolotl-contribs-mit", "bitsandbytes", "colorama",
    "datasets", "einops", "evaluate", "fastcore", "fire", "numba", "nvidia-ml-py", "peft", "posthog", "pydantic",
    "python-dotenv", "requests", "schedulefree", "scipy", "sentencepiece", "tensorboard", "tokenizers", "transformers",
    "triton", "trl", "wandb",
}  # fmt: skip
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(?P<pin>[^;]*)")


def main() -> None:
    """Make missing files."""
    for version in sys.argv[1:]:
        if not (FOLDER / version / ".ready").exists():
            make(FOLDER / version, version)


def make(folder: Path, version: str) -> None:
    """Make the environment of one release, and mark it as ready."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", f"axolotl=={version}"], check=True)
    question = "import importlib.metadata as m; print(*m.requires('axolotl'), sep='\\n')"
    said = subprocess.run([str(python), "-c", question], check=True, capture_output=True, text=True).stdout
    subprocess.run(
        [*pip, "torch==2.13.0", "-e", f"{ROOT}[reference,test]", *needed(said)],
        check=True,
    )
    (folder / ".ready").touch()


def needed(requirements: str) -> list[str]:
    """Return those of Axolotl's requirements that training imports, with their pins."""
    found = [REQUIREMENT.match(line) for line in requirements.splitlines() if "extra ==" not in line]
    return [each["name"] + each["pin"].strip() for each in found if each and each["name"].lower() in NEEDED]


if __name__ == "__main__":
    main()
