# SPDX-License-Identifier: Apache-2.0
"""The scripts of `evals/` stand beside their data, not in a package; tests load them by their paths."""

import importlib.util
import sys
from typing import Any

import pytest

from skill_tools.bundle import root


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, root() / "evals" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def grader() -> Any:
    return script("grade")


@pytest.fixture(scope="session")
def benchmark_script(grader: Any) -> Any:
    """It imports `grade`, which the other fixture has loaded."""
    return script("benchmark")


@pytest.fixture(scope="session")
def lay_out_script() -> Any:
    return script("lay_out")
