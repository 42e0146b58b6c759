# SPDX-License-Identifier: Apache-2.0
"""The one name that users import: complete, lazy, and the command as a module."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_offloading
import skill_tools

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_it_has_every_public_name_of_the_library() -> None:
    library = pytest.importorskip("reference_impl", reason="needs torch: pip install '.[reference]'")
    assert set(library.__all__) <= set(cpu_offloading.__all__) <= set(dir(cpu_offloading))
    for name in library.__all__:
        assert getattr(cpu_offloading, name) is getattr(library, name)
    assert all(getattr(cpu_offloading, name) for name in cpu_offloading.__all__)


def test_it_states_the_version() -> None:
    assert cpu_offloading.__version__ == skill_tools.__version__


def test_a_name_that_it_lacks_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HybridOptimizer'"):
        importlib.import_module("cpu_offloading").HybridOptimizer  # noqa: B018


def test_to_import_it_loads_neither_torch_nor_what_it_names() -> None:
    code = (
        "import sys; before = {*sys.modules}; import cpu_offloading; print(*sorted({*sys.modules} - before))"
    )
    assert not {name.partition(".")[0] for name in run("-c", code).split()} & {
        "numpy", "reference_impl", "skill_tools", "torch", "yaml",
    }  # fmt: skip


def test_it_is_the_command_as_a_module() -> None:
    assert run("-m", "cpu_offloading", "--version").startswith(f"offload {skill_tools.__version__} ")
    assert run("-m", "cpu_offloading", "explain", "la-pp").startswith("# ")
