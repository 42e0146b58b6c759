# SPDX-License-Identifier: Apache-2.0
"""The releases of transformers that `make test-transformers` put under build/transformers, and a way to ask one.

A release is asked in a process of its own, because two releases cannot be imported into one.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(__file__).parents[3] / "build" / "transformers"
_PROCESS = Path(__file__).with_name("trainer_process.py")


def installed() -> list[str]:
    """Return the releases that are there, oldest first."""
    found = [path.name for path in FOLDER.glob("[0-9]*") if (path / "transformers").is_dir()]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class Release:
    """One release, running; a context manager, so that its process ends with the test."""

    def __init__(self, version: str) -> None:
        self.version = version
        dependencies = FOLDER / f"dependencies-{version.partition('.')[0]}"
        self._process = subprocess.Popen(
            [sys.executable, str(_PROCESS), str(FOLDER / version), str(FOLDER / "beside"), str(dependencies)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request (see `trainer_process`)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer
