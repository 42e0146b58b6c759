# SPDX-License-Identifier: Apache-2.0
"""A run by Accelerate's file, the launcher's options and the environment, in the launcher's own order."""

import json
from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.rules.lint import lint

HEAD = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n"
FSDP = f"{HEAD}distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
DEEPSPEED = f"{HEAD}distributed_type: DEEPSPEED\ndeepspeed_config:\n"
OFFLOAD = "accelerate.fsdp_config.fsdp_offload_params"
STAGE = "deepspeed.zero_optimization.stage"


def rules(config: Config, release: str = "1.15.0") -> dict[str, int]:
    found = lint(config, versions={"accelerate": release}).findings
    return {finding.rule: finding.place.line for finding in found}


def launched(tmp_path: Path, text: str, options: str = "", exports: str = "") -> Config:
    """Read a script that launches with the file `text`."""
    (tmp_path / "acc.yaml").write_text(text)
    script = tmp_path / "run.sh"
    script.write_text(
        f"{exports}\naccelerate launch --config_file acc.yaml {options} train.py --fsdp full_shard\n"
    )
    return read([script], framework="accelerate")


@pytest.mark.parametrize(
    "text",
    [
        FSDP,
        "distributed_type: MULTI_GPU\nnum_processes: 2\n",
        '{"distributed_type": "NO", "machine_rank": 0}',
    ],
)
def test_its_file_is_recognised_and_gets_no_word_of_another_framework(text: str) -> None:
    config = read_text(text, "a.json" if text.startswith("{") else "a.yaml")
    assert config.framework == "accelerate"
    assert not rules(config)


def test_a_field_may_lack_its_prefix() -> None:
    config = read_text(f"{FSDP}  offload_params: true\n", "a.yaml")
    assert (config.value(OFFLOAD), config.settings[OFFLOAD].written) == (True, "fsdp_config.offload_params")


def test_a_key_at_the_top_is_refused_and_one_of_a_section_dropped() -> None:
    config = read_text(f"{FSDP}  fsdp_offload_parameters: true\nfsdp_configs: {{a: 1}}\n", "a.yaml")
    assert rules(config) == {"acc-sub-key": 6, "acc-top-key": 7}


def test_a_value_that_nobody_reads_is_no_error() -> None:
    text = f"{HEAD}distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_offload_params: maybe\n"
    assert rules(read_text(text, "a.yaml")).keys() == {"acc-section-type"}
    assert rules(read_text(text.replace("MULTI_GPU", "FSDP"), "a.yaml")) == {"acc-value": 5}


def test_options_come_above_the_file_and_the_file_above_the_environment(tmp_path: Path) -> None:
    config = launched(tmp_path, f"{FSDP}  fsdp_offload_params: true\n", "--fsdp-offload-params=false")
    assert config.value(OFFLOAD) is False
    config = launched(tmp_path, FSDP, exports="export FSDP_OFFLOAD_PARAMS=true")
    assert config.value(OFFLOAD) is None
    assert "acc-env-overwritten" in rules(config)


def test_the_environment_fills_what_the_launcher_leaves_out(tmp_path: Path) -> None:
    text = f"{HEAD}distributed_type: DEEPSPEED\n"
    config = launched(tmp_path, text, exports="export ACCELERATE_DEEPSPEED_ZERO_STAGE=3")
    assert config.value(STAGE) == 3
    config = launched(tmp_path, FSDP, exports="export FSDP_STATE_DICT_TYPE=LOCAL_STATE_DICT")
    assert "acc-fsdp2-local-sd" in rules(config)


def test_a_flag_takes_the_place_of_the_type(tmp_path: Path) -> None:
    config = launched(tmp_path, f"{DEEPSPEED}  zero_stage: 3\n", "--use_fsdp")
    assert config.value("accelerate.distributed_type") == "FSDP"
    assert STAGE not in config.settings


def test_without_a_file_the_users_own_may_say_anything(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --use_fsdp --fsdp_offload_params true train.py\n")
    config = read([script], framework="accelerate")
    assert config.value(OFFLOAD) is True
    assert "accelerate.fsdp_config.fsdp_version" in config.maybe_set


def test_options_that_cannot_be_read_leave_open_what_nobody_says(tmp_path: Path) -> None:
    config = launched(tmp_path, FSDP, "$EXTRA --fsdp_offload_params true")
    assert config.value(OFFLOAD) is True
    assert "accelerate.fsdp_config.fsdp_state_dict_type" in config.maybe_set


def test_fields_become_the_json_that_deepspeed_gets() -> None:
    config = read_text(f"{DEEPSPEED}  zero_stage: 2\n  offload_param_device: cpu\n", "a.yaml")
    device = config.settings["deepspeed.zero_optimization.offload_param.device"]
    assert (device.value, device.written, device.place.line) == (
        "cpu",
        "deepspeed_config.offload_param_device",
        6,
    )
    assert 6 in {line for rule, line in rules(config).items() if rule.startswith("ds-")}
    assert read_text(f"{HEAD}distributed_type: DEEPSPEED\n", "a.yaml").value(STAGE) == 2


def test_a_named_deepspeed_file_is_followed(tmp_path: Path) -> None:
    zero = {"stage": "auto", "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero}, indent=1))
    run = tmp_path / "a.yaml"
    run.write_text(f"{DEEPSPEED}  deepspeed_config_file: zero.json\n")
    config = read([run])
    assert config.value(STAGE) == 2
    assert config.settings[STAGE].place.file.endswith("zero.json")
    assert "ds-ratio" in rules(config)


def test_a_deepspeed_file_that_is_not_there_leaves_its_section_open(tmp_path: Path) -> None:
    run = tmp_path / "a.yaml"
    run.write_text(f"{DEEPSPEED}  deepspeed_config_file: zero.json\nmixed_precision: bf16\n")
    config = read([run])
    assert STAGE in config.maybe_set
    assert rules(config).keys() == {"acc-ds-file-and-fields"}
    assert config.missing_files


def test_megatrons_options_take_any_text_for_true(tmp_path: Path) -> None:
    text = f"{HEAD}distributed_type: MEGATRON_LM\n"
    config = launched(tmp_path, text, "--megatron_lm_optimizer_cpu_offload false")
    assert config.value("accelerate.megatron_lm_config.megatron_lm_optimizer_cpu_offload") is True
    assert {"acc-megatron-bool-flag", "acc-megatron-offload"} <= rules(config).keys()
