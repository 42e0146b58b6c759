# SPDX-License-Identifier: Apache-2.0
"""Fetches the packages that the judges of the RL frameworks ask, into build/: sources of releases, and a few libraries.

    python tests/judges/rl/fetch.py

Nothing is installed into this environment: wheels are unpacked, archives of tags are unpacked beside them, and the
libraries go into build/rl/libraries. A release that is there is not fetched again.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path

BUILD = Path(__file__).parents[3] / "build"
WHEELS = {
    "verl": ("0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    "ms_swift": ("3.12.6", "4.0.4", "4.3.2", "4.5.3", "4.6.0"),
}
TAGS = {
    "nemo_rl": ("NVIDIA-NeMo/RL", ("v0.4.0", "v0.5.0", "v0.6.0", "v0.7.0", "main")),
    "prime_rl": ("PrimeIntellect-ai/prime-rl", ("v0.6.0", "v0.7.0", "v0.8.0", "main")),
    "megatron_lm": ("NVIDIA/Megatron-LM", ("core_v0.16.1", "core_v0.19.0")),  # its command line's code
}
TRANSFORMERS = ("4.57.3", "5.10.4")
LIBRARIES = ("hydra-core==1.3.2", "pydantic==2.12.5", "prime-pydantic-config==0.4.3", "pyyaml", "httpx")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    """Fetch the releases that are not there yet."""
    libraries = BUILD / "rl" / "libraries"
    if not libraries.is_dir():
        subprocess.run([*PIP, "install", "--target", str(libraries), *LIBRARIES], check=True)
    for name, versions in WHEELS.items():
        for version in versions:
            unpack_wheel(name, version, BUILD / name / version)
    for version in TRANSFORMERS:
        unpack_wheel("transformers", version, BUILD / "ms_swift" / "dependencies" / f"transformers-{version}")
    for name, (repository, tags) in TAGS.items():
        for tag in tags:
            unpack_tag(repository, tag, BUILD / name / tag.removeprefix("core_").removeprefix("v"))


def unpack_wheel(name: str, version: str, target: Path) -> None:
    """Download one wheel without its requirements, and unpack it."""
    if target.is_dir():
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{name.replace('_', '-')}=={version}"
        subprocess.run([*PIP, "download", "--no-deps", "--dest", folder, wanted], check=True)
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)


def unpack_tag(repository: str, tag: str, target: Path) -> None:
    """Download the archive of a tag or branch, and unpack it without its leading folder."""
    if target.is_dir():
        return
    with urllib.request.urlopen(f"https://codeload.github.com/{repository}/tar.gz/{tag}") as answer:
        data = io.BytesIO(answer.read())
    with tarfile.open(fileobj=data) as archive:
        for member in archive.getmembers():
            path = target / member.name.partition("/")[2]
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


if __name__ == "__main__":
    main()
