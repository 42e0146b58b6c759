# SPDX-License-Identifier: Apache-2.0
"""The wheel as a user installs it: complete, and working in an environment that has nothing else."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import skill_tools
from skill_tools.bundle import root

pytestmark = pytest.mark.slow

LARGEST_BYTES = 2_500_000


def call(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that finds no checkout: only installed files count."""
    command, environment = [str(word) for word in words], {**os.environ}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def built(folder: Path) -> Path:
    done = call(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, root(), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def offload(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `offload` command of an empty environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv")
    assert call(sys.executable, "-m", "venv", folder, cwd=folder).returncode == 0
    done = call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "offload"


def test_it_carries_the_facts_and_nothing_for_contributors(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("SKILL.md", "card.yaml", "schema/findings.schema.json", "schema/card.schema.json"):
        assert f"skill_tools/_bundle/{name}" in names
    for path in (root() / "offload_arithmetic").glob("*.py"):
        assert path.relative_to(root()).as_posix() in names
    knowledge = root() / "skill_tools" / "knowledge"
    for path in knowledge.rglob("*.*"):
        if path.suffix in {".yaml", ".json", ".txt"}:
            # The index has rules and faults; the YAML that they are compiled from is an eighth of a wheel.
            assert (path.relative_to(root()).as_posix() in names) == (
                path.parent not in (knowledge / "rules", knowledge / "fixes")
            )
    for package in ("cpu_offloading", "offload_arithmetic", "offload_watch", "reference_impl", "skill_tools"):
        assert f"{package}/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "evals/", "docs/"))]
    # `explain` prints a rule's page; 680 of them would take a quarter of the wheel.
    assert not [name for name in names if "/docs/" in name]
    assert wheel.stat().st_size <= LARGEST_BYTES


def description(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return archive.read(name).decode()


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)\s]+)\)", text))


def test_its_readme_has_no_link_that_pypi_cannot_follow(wheel: Path) -> None:
    """Built where no repository is known; the version is that of the one file that states it."""
    text = description(wheel)
    assert f"\nVersion: {skill_tools.__version__}\n" in text
    assert {link for link in links(text) if not link.startswith(("https://", "#"))} == set()
    assert "![" not in text


def test_a_workflow_s_wheel_names_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://git.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/fork")
    monkeypatch.setenv("GITHUB_SHA", "0123abc")
    text = description(built(tmp_path))
    assert "Project-URL: Issues, https://git.example/someone/fork/issues" in text
    assert "(https://git.example/someone/fork/raw/0123abc/docs/figures/plan.svg)" in text
    for link in links(text):
        path = link.removeprefix("https://git.example/someone/fork/").partition("#")[0]
        assert path == link.partition("#")[0] or (root() / path.split("/", 2)[2]).exists(), link


def test_lint_works(offload: Path, tmp_path: Path) -> None:
    shutil.copy(root() / "examples" / "broken_bridge.yaml", tmp_path)
    done = call(offload, "lint", "broken_bridge.yaml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "la-pp" in done.stdout


def test_plan_works(offload: Path, tmp_path: Path) -> None:
    shutil.copy(root() / "examples" / "good_bridge.yaml", tmp_path)
    words = ("plan", "good_bridge.yaml", "--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu-memory", "80GB")
    done = call(offload, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "GiB" in done.stdout


def test_explain_works(offload: Path, tmp_path: Path) -> None:
    done = call(offload, "explain", "la-pp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Pipeline parallelism" in done.stdout


def test_card_needs_a_checkout_and_says_so(offload: Path, tmp_path: Path) -> None:
    done = call(offload, "card", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "is no checkout" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_installed_without_a_clone(offload: Path, tmp_path: Path) -> None:
    done = call(offload, "verify", cwd=tmp_path)
    assert done.returncode == 2
    assert "torch is not installed" in done.stderr
    assert "-m pip install 'numpy>=1.26' 'torch>=2.11'" in done.stderr
    assert "clone" not in done.stderr
    done = call(offload.with_name("python"), "-c", "from cpu_offloading import fit", cwd=tmp_path)
    assert "cpu_offloading.fit needs torch, which is not installed" in done.stderr
    assert "-m pip install 'numpy>=1.26' 'torch>=2.11'" in done.stderr


def test_the_module_is_the_command(offload: Path, tmp_path: Path) -> None:
    done = call(offload.with_name("python"), "-m", "cpu_offloading", "--version", cwd=tmp_path)
    assert done.stdout.startswith(f"offload {skill_tools.__version__} "), done.stderr


USERS_SCRIPT = """\
import torch
from cpu_offloading import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    TrainableLayerStreamer,
    __version__,
    apply_plan,
    fit,
    park,
    trace,
)


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    peak: int = trace(model, batches[0]).peak_bytes
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with fit(model, adamw, batches[0]) as fitted:
        fitted.optimizer.step()
    with apply_plan(model, adamw, {"execute": {}}) as applied:
        applied.optimizer.step()
    with HybridDeviceOptimizer(model.parameters(), lr=1e-4, offload_fraction=1.0) as optimizer:
        optimizer.attach(model)
        with CheckpointOffloader(model), ActivationOffloader(model, num_layers=2), FrozenLayerStreamer(model):
            for batch in batches:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    with TrainableLayerStreamer(model, adamw) as streamer:
        streamer.optimizer.step()
    states: OptimizerStateOffloader = OptimizerStateOffloader(adamw)
    states.close()
    with park(model, adamw):
        pass
    return peak / 1e9


version: str = __version__
"""


def test_mypy_accepts_a_strict_user_s_script(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the wheel, and torch from this one."""
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    pytest.importorskip("mypy", reason="the extra `test` is not installed")
    venv = tmp_path / "venv"
    assert call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path).returncode == 0
    (site,) = venv.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(USERS_SCRIPT, encoding="utf-8")
    words = ("--strict", "--python-executable", venv / "bin" / "python", "train.py")
    done = call(sys.executable, "-m", "mypy", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    (tmp_path / "train.py").write_text(
        USERS_SCRIPT.replace("offload_fraction=1.0", 'offload_fraction="all"'), encoding="utf-8"
    )
    assert 'incompatible type "str"' in call(sys.executable, "-m", "mypy", *words, cwd=tmp_path).stdout
