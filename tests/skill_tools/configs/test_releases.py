# SPDX-License-Identifier: Apache-2.0
"""The releases stated in a text: exact ones, of known distributions, and no mere comparison."""

from pathlib import Path

import pytest

from skill_tools.configs.releases import Stated, stated_beside, stated_in


def versions(text: str) -> dict[str, str]:
    return {name: each.version for name, each in stated_in(text).items()}


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("# axolotl 0.21.0\nbase_model: x\n", {"axolotl": "0.21.0"}),
        ("a: 1  # runs with Megatron-Core v0.16.1, on H100\n", {"megatron-core": "0.16.1"}),
        ("# megatron core 0.16.1 / Transformer Engine 2.9", {"megatron-core": "0.16.1", "transformer-engine": "2.9"}),
        ("pip install 'megatron_core[mlm]==0.16.1'", {"megatron-core": "0.16.1"}),
        ("pip install torch==2.8.0+cu128", {"torch": "2.8.0+cu128"}),
        ('[[package]]\nname = "accelerate"\nversion = "1.14.0"\n', {"accelerate": "1.14.0"}),
        ("image: nvcr.io/nvidia/nemo:26.08.x", {"megatron-bridge": "0.6.0"}),
        ("#SBATCH --container-image=nvcr.io#nvidia/nemo:25.09",
         {"megatron-core": "0.14.0", "transformer-engine": "2.7.0"}),
        ("FROM axolotlai/axolotl:0.21.0-py3.11-cu126-2.7.1", {"axolotl": "0.21.0"}),
        ("FROM axolotlai/axolotl:main-20250917-py3.11", {}),
        ("FROM nvcr.io/nvidia/nemo:dev", {}),
        ("# since axolotl 0.18\n# axolotl 0.18 or newer\n# before axolotl 0.18, no\n# axolotl 0.18 has it", {}),
        ("axolotl>=0.18\ntorch!=2.8.0\ntorch===2.8.0\nlr: 0.1 # 0.2", {}),
        ("transformers: 4.57.3", {}),
    ],
)  # fmt: skip
def test_only_an_exact_release_is_stated(text: str, stated: dict[str, str]) -> None:
    assert versions(text) == stated


def test_a_statement_has_a_place() -> None:
    assert stated_in("a\nb\n# axolotl 0.21.0\n", "run.yaml") == {
        "axolotl": Stated("0.21.0", "run.yaml line 3")
    }


def test_files_beside_count_where_they_agree(tmp_path: Path) -> None:
    (tmp_path / "requirements-gpu.txt").write_text("torch==2.8.0\naxolotl==0.20.0\n")
    (tmp_path / "uv.lock").write_text('[[package]]\nname = "axolotl"\nversion = "0.21.0"\n')
    (tmp_path / "Dockerfile").write_text("FROM pytorch/pytorch:2.8.0-cuda12.6\n")
    (tmp_path / "notes.txt").write_text("accelerate==1.14.0\n")
    found = stated_beside(str(tmp_path))
    assert found == {"torch": Stated("2.8.0", "Dockerfile line 1")}
    assert stated_beside(str(tmp_path / "gone")) == {}


def test_the_root_of_the_project_states_what_the_folder_does_not(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts" / "train"
    scripts.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        'dependencies = ["transformers==4.37.2", "accelerate==1.14.0"]\n'
    )
    (scripts / "requirements.txt").write_text("accelerate==1.15.0\n")
    found = stated_beside(str(scripts))
    assert found["transformers"] == Stated("4.37.2", "../../pyproject.toml line 1")
    assert found["accelerate"] == Stated("1.15.0", "requirements.txt line 1")


def test_two_extras_of_a_project_that_differ_state_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('a = ["transformers==4.57.3"]\nb = ["transformers==5.5.0"]\n')
    assert stated_beside(str(tmp_path)) == {}


DYNAMIC = '[project]\nname = "axolotl"\n[tool.setuptools.dynamic]\nversion = {file = "VERSION"}\n'


@pytest.mark.parametrize(
    ("files", "stated"),
    [
        ({"pyproject.toml": DYNAMIC, "VERSION": "0.18.0\n"},
         {"axolotl": Stated("0.18.0+checkout", "../pyproject.toml line 4")}),
        ({"pyproject.toml": DYNAMIC, "VERSION": "unknown\n"}, {}),
        ({"pyproject.toml": '[project]\nname = "prime-rl"\nversion = "0.8.0"\n'},
         {"prime-rl": Stated("0.8.0+checkout", "../pyproject.toml line 3")}),
        ({"setup.py": 'setup(\n    name="axolotl",\n    version="0.4.1",\n)\n'},
         {"axolotl": Stated("0.4.1+checkout", "../setup.py line 2")}),
    ],
)  # fmt: skip
def test_a_checkout_of_a_framework_says_its_own_release(
    tmp_path: Path, files: dict[str, str], stated: dict[str, Stated]
) -> None:
    (tmp_path / "examples").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert stated_beside(str(tmp_path / "examples")) == stated
