# SPDX-License-Identifier: Apache-2.0
"""torchtitan's TOML with its lines, the options of a launch script on top, and the plan as TOML."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.dialects.registry import named
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

TOML = """\
[job]
dump_folder = "./out"

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
enable_cpu_offload = true

[parallelism]
data_parallel_shard_degree = -1
"""


def composed(text: str, *overrides: str, filename: str = "run.toml") -> Config:
    return read_text(text, filename, overrides=overrides, framework="torchtitan")


def ids(config: Config, release: str = "0.2.2") -> list[str]:
    return [finding.rule for finding in lint(config, versions={"torchtitan": release}).findings]


@pytest.mark.parametrize(
    ("text", "filename", "is_ours"),
    [
        (TOML, "x.toml", True),
        (TOML, "-", True),
        (TOML.replace("[parallelism]", "[other]"), "x.toml", False),
        (TOML.replace("[job]", "[jobs]").replace("[model]", "[models]"), "x.toml", False),
        ('[training]\nlr = 1\n[model]\nname = "x"\n[parallelism]\ntp = 1\n', "x.toml", False),
        ("training: {local_batch_size: 1}\nmodel: {name: x}\nparallelism: {data_parallel_shard_degree: 1}\n", "x.yaml",
         False),
        ("torchrun -m torchtitan.train --job.config_file x.toml\n", "x.sh", True),
        ("CONFIG_FILE=x.toml ./run_train.sh\n", "x.sh", True),
        ("# see torchtitan.train\npython train.py\n", "x.sh", False),
    ],
)  # fmt: skip
def test_it_is_recognised_by_sections_with_its_own_fields(text: str, filename: str, is_ours: bool) -> None:
    try:
        found = read_text(text, filename).framework == "torchtitan"
    except UnusableInput:
        found = False
    assert found is is_ours


def test_a_finding_stands_on_the_line_that_its_fix_changes() -> None:
    config = composed(TOML.replace("degree = -1", "degree = 1"))
    finding = lint(config, versions={"torchtitan": "0.2.2"}).findings[0]
    assert (finding.rule, finding.place.line) == ("titan-offload-no-fsdp", 13)


def test_options_win_over_the_file_in_either_spelling(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text(TOML, encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config-file llama.toml \\\n"
        "  --training.no-enable_cpu_offload --parallelism.data-parallel-shard-degree 4 --training.steps=$STEPS\n",
        encoding="utf-8",
    )
    config = read([script])
    assert config.complete
    assert config.value("torchtitan.training.enable_cpu_offload") is False
    assert config.value("torchtitan.parallelism.data_parallel_shard_degree") == 4
    assert "training.steps" in config.unresolved
    assert config.model_name == "llama3-8B"


def test_without_its_file_and_under_a_module_a_default_is_a_guess() -> None:
    for script in (
        "torchrun -m torchtitan.train --job.config_file no.toml --training.enable_cpu_offload\n",
        "torchrun -m torchtitan.train --module llama3 --config llama3_8b --training.enable_cpu_offload\n",
    ):
        config = composed(script, filename="run.sh")
        assert not config.complete
        assert set(ids(config, "0.3.0")) == {"titan-offload-key", "titan-cudagraph-offload"}
        found = lint(config, versions={"torchtitan": "0.3.0"}).findings
        assert [each.rule for each in found if each.unless] == ["titan-cudagraph-offload"]


def test_a_field_in_the_wrong_section_is_found_unless_a_module_may_add_it() -> None:
    text = TOML.replace("[parallelism]\n", "[parallelism]\nenable_cpu_offload = true\n")
    assert "titan-key-place" in ids(composed(text))
    own = text.replace("[job]\n", '[job]\ncustom_config_module = "mine"\n')
    assert "titan-key-place" not in ids(composed(own))
    assert "titan-key-place" in ids(composed(TOML, "--memory.enable_cpu_offload"))
    assert "titan-key-place" not in ids(composed(TOML, "--flux.steps 3"))


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("llama3", "70B", "llama3-70B"),
        ("deepseek_v3", "671B", "deepseek-v3"),
        ("deepseek_v3", "16B", None),
        ("flux", "flux-dev", None),
    ],
)
def test_name_and_flavor_say_which_model_it_is(name: str, flavor: str, model: str | None) -> None:
    text = TOML.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"')
    assert composed(text).model_name == model


def test_a_patch_is_toml() -> None:
    settings = {
        "torchtitan.training.enable_cpu_offload": True,
        "torchtitan.activation_checkpoint.mode": "full",
    }
    text = named("torchtitan").patch(settings).text
    assert text == '[training]\nenable_cpu_offload = true\n\n[activation_checkpoint]\nmode = "full"\n'
