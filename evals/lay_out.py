"""Lays one task of `evals.json` out for a run: copies its files into a folder and prints its prompt.

    python3 evals/lay_out.py TASK FOLDER

FOLDER is made when it is absent and must be empty, so that an earlier run leaves no hints. Only the task's own files
go there: neither its checks nor its expected answer. Exit codes: 0 laid out, 2 no such task or no usable folder.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


class UnusableError(Exception):
    """The task is unknown or the folder is not empty."""


def lay_out(task: str, folder: Path) -> str:
    """Copy the task's files below `folder` and return its prompt."""
    tasks = {one["id"]: one for one in json.loads((HERE / "evals.json").read_text(encoding="utf-8"))["evals"]}
    if task not in tasks:
        raise UnusableError(f"no task {task}; expected one of {', '.join(sorted(tasks))}")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UnusableError(
            f"{folder} is not empty; name a new folder, because each run starts from a fresh one"
        )
    for name in tasks[task]["files"]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, target)
    prompt: str = tasks[task]["prompt"]
    return prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Lay out the task named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="a task's id in evals.json")
    parser.add_argument("folder", type=Path, help="a new or an empty folder")
    args = parser.parse_args(argv)
    try:
        print(lay_out(args.task, args.folder))
    except (UnusableError, OSError) as error:
        print(f"lay_out: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
