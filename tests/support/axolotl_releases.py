# SPDX-License-Identifier: Apache-2.0
"""The released Axolotl schemas that `make test-axolotl` put under build/axolotl, and a way to ask one of them.

A release is asked in a process of its own, because two releases cannot be imported into one and because its
dependencies are not the project's.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FOLDER = Path(__file__).parents[2] / "build" / "axolotl"
DEPENDENCIES = FOLDER / "dependencies"
_PROCESS = Path(__file__).with_name("axolotl_process.py")


def installed() -> list[str]:
    """Return the releases that are there, oldest first."""
    found = [path.name for path in FOLDER.glob("[0-9]*") if (path / "axolotl" / "utils" / "schemas").is_dir()]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


class Release:
    """One release's schema, running; a context manager, so that its process ends with the test."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._process = subprocess.Popen(
            [sys.executable, str(_PROCESS), str(FOLDER / version), str(DEPENDENCIES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, configuration: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return `errors` and `warnings` of the real schema for one configuration."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(configuration) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[str]] = json.loads(self._process.stdout.readline())
        return answer
