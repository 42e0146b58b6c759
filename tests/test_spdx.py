# SPDX-License-Identifier: Apache-2.0
"""Each source file names its licence; REUSE.toml has who wrote it."""

import subprocess

import pytest

from skill_tools.bundle import root

ROOT = root()
LINE = "SPDX-License-Identifier: Apache-2.0"
# Users' scripts, as users write them, and reproductions of others' faults.
NOT_OURS = ("evals/", "findings/")


def test_each_source_file_names_its_licence() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, which lists the files")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.js", "*.css", ".ci/run"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    sources = [name for name in listed.stdout.split("\0") if name and not name.startswith(NOT_OURS)]
    assert len(sources) > 1000
    without = [name for name in sources if LINE not in (ROOT / name).read_text(encoding="utf-8")[:200]]
    assert not without, "a first line is missing: # " + LINE + "\n" + "\n".join(without)
