"""The grader is a script beside its data, not a module of a package; tests load it by its path."""

import importlib.util
import sys
from typing import Any

import pytest

from skill_tools.bundle import root


@pytest.fixture(scope="session")
def grader() -> Any:
    spec = importlib.util.spec_from_file_location("evals_grade", root() / "evals" / "grade.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
