# SPDX-License-Identifier: Apache-2.0
"""Lints the files of public repositories that hold no configuration of ours: none may be taken for one.

    python tests/judges/recognition/check.py            (make test-recognition)

`foreign.txt` lists the repositories with their commits. Each is fetched into build/foreign, without a working tree,
and its YAML, JSON, TOML, Python and shell files are linted from a temporary folder: named, each is refused in one
line; with --skip-unrecognized all are passed over, exit code 0 and not a word. Prints one line a repository; exit code
1 where a file is taken for one of ours.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from skill_tools.__main__ import main
from skill_tools.configs.files import MAX_BYTES
from skill_tools.configs.source import load
from skill_tools.dialects.read import readings
from skill_tools.errors import UnusableInput

LIST = Path(__file__).with_name("foreign.txt")
FOLDER = Path(__file__).parents[3] / "build" / "foreign"
SUFFIXES = {".yaml", ".yml", ".json", ".toml", ".py", ".sh", ".bash", ".slurm", ".sbatch"}
REGULAR = ("100644", "100755")


def fetched(repository: str, commit: str) -> Path:
    """Return the git folder of one commit of a repository, fetched where it is not there yet."""
    folder = FOLDER / repository.replace("/", "+")
    if not folder.exists():
        subprocess.run(["git", "init", "--quiet", "--bare", str(folder)], check=True)
        url = f"https://github.com/{repository}"
        subprocess.run(
            ["git", "-C", str(folder), "fetch", "--quiet", "--depth", "1", url, commit], check=True
        )
    return folder


def files(git: Path, commit: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file of a commit that lint would look at."""
    listed = _git(git, "ls-tree", "-r", "-l", "-z", commit).decode()
    wanted = []
    for entry in filter(None, listed.split("\0")):
        about, _, path = entry.partition("\t")
        mode, _, name, size = about.split()
        if mode in REGULAR and Path(path).suffix in SUFFIXES and int(size) <= MAX_BYTES:
            wanted.append((path, name))
    answers = io.BytesIO(_git(git, "cat-file", "--batch", given="\n".join(name for _, name in wanted)))
    for path, _ in wanted:
        size = int(answers.readline().split()[-1])
        yield path, answers.read(size)
        answers.read(1)


def _git(folder: Path, *words: str, given: str = "") -> bytes:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, input=given.encode()).stdout


def misread(path: Path) -> str:
    """Return the dialect that one file is taken for, or its refusal of more than a line; empty where all is well."""
    try:
        return ", ".join(f"{found.dialect.name} by {found.proof}" for found in readings([load(path)]))
    except UnusableInput as error:
        return repr(str(error)) if "\n" in str(error) else ""


def spoken(paths: list[Path]) -> str:
    """Return lint's words about files to pass over: there should be none."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["lint", "--skip-unrecognized", "--format", "concise", *map(str, paths)])
    said = out.getvalue()[:500] + err.getvalue()[:500]
    return f"exit code {code}: {said}" if code or said else ""


def check(repository: str, commit: str) -> tuple[int, list[str]]:
    """Return how many files of a repository were linted, and the errors."""
    wrong, paths = [], []
    with tempfile.TemporaryDirectory() as name:
        for path, content in files(fetched(repository, commit), commit):
            target = Path(name) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            paths.append(target)
            if what := misread(target):
                wrong.append(f"{path}: {what}")
        said = spoken(paths)
    return len(paths), [*wrong, *([said] if said else [])]


if __name__ == "__main__":
    is_wrong = False
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        repository, commit, count = line.split()
        linted, wrong = check(repository, commit)
        if linted != int(count):
            wrong.append(f"{linted} files, expected {count}")
        print(f"{repository}: {linted} files, {len(wrong)} misread", *wrong, sep="\n  ", flush=True)
        is_wrong |= bool(wrong)
    sys.exit(int(is_wrong))
