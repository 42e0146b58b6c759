# SPDX-License-Identifier: Apache-2.0
"""The card's recommendations and good `examples/` have no fault; broken ones have."""

from pathlib import Path

import pytest
import yaml

from skill_tools.__main__ import main
from skill_tools.bundle import root
from skill_tools.card.blocks import as_text
from skill_tools.card.load import load_card

PATHS = load_card(root() / "card.yaml")["recommended_path"]
CASES = [
    pytest.param(framework, settings, id=f"{mechanism}-{framework}")
    for mechanism, frameworks in PATHS.items()
    for framework, settings in frameworks.items()
]
RELEASES = ("megatron-core==0.19.0", "transformer-engine==2.12.0", "axolotl==0.18.0", "torch==2.11.0")


def as_file(framework: str, settings: dict[str, object], folder: Path) -> Path:
    """Write the settings as their user would start a run with them."""
    text = as_text(framework, settings)
    if framework == "axolotl":
        path = folder / "config.yaml"
        path.write_text(f"base_model: NousResearch/Meta-Llama-3.1-8B\n{text}\n", encoding="utf-8")
        return path
    exports = [line for line in text.splitlines() if line.startswith("export ")]
    words = [line for line in text.splitlines() if not line.startswith("export ")]
    script = (
        "pretrain_gpt.py"
        if framework == "megatron-lm"
        else "run_recipe.py --recipe llama3_8b_pretrain_config"
    )
    path = folder / "run.sh"
    launch = ["export OMP_NUM_THREADS=8", *exports, f"torchrun {script} " + " ".join(words)]
    path.write_text("\n".join(launch) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("framework", "settings"), CASES)
def test_a_recommended_path_lints_clean(
    framework: str, settings: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = as_file(framework, settings, tmp_path)
    targets = [word for release in RELEASES for word in ("--target", release)]
    code = main(["lint", "--framework", framework, *targets, str(path)])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in (root() / "examples").glob("good_*")))
def test_a_good_example_has_no_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(root() / "examples" / name)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in (root() / "examples").glob("broken_*")))
def test_a_broken_example_has_errors(name: str) -> None:
    assert main(["lint", "--fail-on", "error", str(root() / "examples" / name)]) == 1


def test_an_axolotl_path_is_yaml() -> None:
    for frameworks in PATHS.values():
        if "axolotl" in frameworks:
            assert yaml.safe_load(as_text("axolotl", frameworks["axolotl"])) == frameworks["axolotl"]
