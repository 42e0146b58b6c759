# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's YAML over its parents, overrides on top, and the policy's keys for Megatron."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.rules.lint import lint

PARENT = """\
grpo: {max_num_steps: 1}
cluster: {gpus_per_node: 8, num_nodes: 1}
policy:
  precision: bfloat16
  dtensor_cfg: {_v2: true, enabled: true, cpu_offload: false}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    optimizer:
      optimizer: adam
      optimizer_cpu_offload: false
      optimizer_offload_fraction: 0.0
      use_distributed_optimizer: true
      use_precision_aware_optimizer: true
      bf16: true
"""
CHILD = """\
defaults: parent.yaml
policy:
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    optimizer: {optimizer_cpu_offload: true}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parent.yaml").write_text(PARENT, encoding="utf-8")
    (tmp_path / "child.yaml").write_text(CHILD, encoding="utf-8")
    return tmp_path


def found(config: Config, version: str = "0.8.0.dev0") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"nemo-rl": version}).findings}


def test_a_child_lies_over_its_parent(folder: Path) -> None:
    config = read([folder / "child.yaml"])
    assert config.framework == "nemo-rl"
    fraction = config.settings["optimizer_offload_fraction"]
    assert Path(fraction.place.file).name == "parent.yaml"
    assert fraction.place.line == 12
    assert "nr-fraction" in found(config)


MARKED = """\
defaults: parent.yaml
policy:
  _override_: true
  dtensor_cfg: {enabled: true}
"""


def test_a_section_at_the_top_that_is_marked_override_forgets_its_parent(folder: Path) -> None:
    for release, held in (("0.5.0", False), ("0.6.0", None)):
        (folder / "other.yaml").write_text(f"# nemo-rl=={release}\n{MARKED}", encoding="utf-8")
        config = read([folder / "other.yaml"])
        assert config.value("policy.dtensor_cfg.enabled") is True
        assert config.value("policy.dtensor_cfg.cpu_offload") is held, release


def test_a_mark_below_the_top_does_nothing(folder: Path) -> None:
    text = "defaults: parent.yaml\npolicy:\n  dtensor_cfg: {_override_: true, enabled: true}\n"
    (folder / "other.yaml").write_text(text, encoding="utf-8")
    assert read([folder / "other.yaml"]).value("policy.dtensor_cfg.cpu_offload") is False


def test_a_parent_that_is_not_here_leaves_open_what_is_not_set() -> None:
    config = read_text(CHILD, "child.yaml")
    assert [setting.value for setting in config.missing_files] == ["parent.yaml"]
    assert {"optimizer_offload_fraction", "use_distributed_optimizer"} <= config.maybe_set
    assert "nr-fraction" not in found(config)


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        text = f"defaults: {other}.yaml\npolicy: {{dtensor_cfg: {{enabled: true}}}}\n"
        (tmp_path / f"{one}.yaml").write_text(text, encoding="utf-8")
    assert read([tmp_path / "a.yaml"]).missing_files


def test_a_script_names_its_configuration(folder: Path) -> None:
    script = folder / "run.sh"
    fraction = "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0"
    script.write_text(f"uv run examples/run_grpo.py --config child.yaml {fraction}\n", encoding="utf-8")
    config = read([script])
    assert config.framework == "nemo-rl"
    assert config.value("optimizer_offload_fraction") == 1.0
    assert "nr-fraction" not in found(config)


def test_full_recompute_is_a_switch_here(folder: Path) -> None:
    config = read([folder / "child.yaml"], overrides=["policy.megatron_cfg.activation_checkpointing=true"])
    assert config.value("recompute_granularity") == "full"
    assert config.value("recompute_method") == "uniform"


def test_fields_of_megatrons_model_go_below_model_overrides(folder: Path) -> None:
    text = CHILD + "    model_overrides: {cpu_offloading: true, cpu_offloading_num_layers: 2}\n"
    text += "    pipeline_model_parallel_size: 2\n"
    (folder / "child.yaml").write_text(text, encoding="utf-8")
    assert "la-pp" in found(read([folder / "child.yaml"]))


def test_what_is_not_handed_on_is_reported(folder: Path) -> None:
    (folder / "child.yaml").write_text(CHILD + "    cpu_offloading: true\n", encoding="utf-8")
    config = read([folder / "child.yaml"])
    assert [each.written for each in config.unknown] == ["policy.megatron_cfg.cpu_offloading"]
    assert "cpu_offloading" not in config.settings


def test_a_key_that_megatrons_class_lacks(folder: Path) -> None:
    config = read([folder / "child.yaml"], overrides=["+policy.megatron_cfg.optimizer.offload_fraction=1.0"])
    assert "nr-megatron-key" in found(config)


def test_the_dtensor_backend_shares_nothing_with_megatron(folder: Path) -> None:
    config = read(
        [folder / "parent.yaml"], overrides=["policy.megatron_cfg.optimizer.optimizer_cpu_offload=true"]
    )
    assert not config.shares
    assert not found(config)


def test_the_environment_of_the_workers_counts(folder: Path) -> None:
    fine = "    fine_grained_activation_offloading: true\n    offload_modules: [core_attn]\n"
    for value, is_reported in (("0", True), ("1", False)):
        text = f'{CHILD}{fine}    env_vars: {{NVTE_CPU_OFFLOAD_V1: "{value}"}}\n'
        (folder / "child.yaml").write_text(text, encoding="utf-8")
        assert ("fg-env-v1-bridge" in found(read([folder / "child.yaml"]))) is is_reported
