# SPDX-License-Identifier: Apache-2.0
"""Axolotl: YAML, the DeepSpeed JSON that it names, and the options of its command line."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

BASE = "base_model: Qwen/Qwen3-8B\n"


def axolotl(text: str, *overrides: str) -> Config:
    return read_text(BASE + text, "qlora.yaml", overrides=overrides, framework="axolotl")


def value(config: Config, key: str) -> object:
    return config.settings[key].value


def test_a_configuration() -> None:
    config = axolotl(
        "# axolotl==0.19.0\nlearning_rate: 2e-5\nmicro_batch_size: 2\nactivation_offloading: legacy\n"
        "datasets:\n  - path: a\n    type: alpaca\ngradient_checkpointing_kwargs:\n  use_reentrant: false\n"
        "special_tokens:\n  pad_token: <pad>\n"
    )
    assert config.framework == "axolotl"
    assert config.complete
    assert config.model_name == "Qwen/Qwen3-8B"
    assert config.versions == {"axolotl": "0.19.0"}
    assert value(config, "activation_offloading") == "legacy"
    assert value(config, "gradient_checkpointing_kwargs.use_reentrant") is False
    assert value(config, "gradient_checkpointing_kwargs") == {"use_reentrant": False}
    assert not config.unknown
    assert not config.wrong_types


def test_a_misspelt_key_is_seen() -> None:
    config = axolotl("activation_offload: true\nfsdp_config:\n  offload_parms: true\n")
    assert [unknown.written for unknown in config.unknown] == [
        "activation_offload",
        "fsdp_config.offload_parms",
    ]
    assert config.unknown[0].nearest[0] == "activation_offloading"
    assert config.unknown[1].nearest[0] == "fsdp_config.offload_params"


def test_the_old_prefix_of_fsdp_fields_is_taken_off() -> None:
    config = axolotl("fsdp_config:\n  fsdp_offload_params: true\n  fsdp_version: 2\n")
    assert value(config, "fsdp_config.offload_params") is True
    assert config.settings["fsdp_config.offload_params"].written == "fsdp_config.fsdp_offload_params"
    assert value(config, "fsdp_version") == 2
    assert not config.unknown


@pytest.mark.parametrize("written", ["maybe", '"false"', "1", "2"])
@pytest.mark.parametrize("name", ["offload_params", "fsdp_cpu_ram_efficient_loading"])
def test_fsdp_config_has_types_from_0_13_on(name: str, written: str) -> None:
    """tests/axolotl asks both releases' own schema the same."""
    text = f"fsdp_version: 2\nfsdp_config:\n  {name}: {written}\n"
    key = f"fsdp_config.{name.removeprefix('fsdp_')}"
    before, since = (axolotl(f"# axolotl=={release}\n{text}") for release in ("0.12.2", "0.13.2"))
    assert not before.wrong_types
    assert value(before, key) == {"maybe": "maybe", '"false"': "false", "1": 1, "2": 2}[written]
    assert value(before, key) is not True
    assert [wrong.setting.key for wrong in since.wrong_types] == [key] * (written in ("maybe", "2"))


@pytest.mark.parametrize(
    ("option", "key", "expected"),
    [
        ("--activation-offloading true", "activation_offloading", True),
        ("--activation-offloading=1", "activation_offloading", True),
        ("--gradient-checkpointing offload", "gradient_checkpointing", "offload"),
        ("--no-layer-offloading", "layer_offloading", False),
        ("--fsdp-config.offload-params", "fsdp_config.offload_params", True),
        ("--micro-batch-size 4 --layer-offloading", "micro_batch_size", 4),
        ("--micro-batch-size 010", "micro_batch_size", 10),
        ("--micro-batch-size 0x10", "micro_batch_size", 16),
        ("micro_batch_size=8", "micro_batch_size", 8),
        ("activation_offloading=disk", "activation_offloading", "disk"),
    ],
)
def test_options_win_over_the_file(option: str, key: str, expected: object) -> None:
    config = axolotl("activation_offloading: false\nmicro_batch_size: 1\n", option)
    assert value(config, key) == expected
    assert config.settings[key].place.file == "<overrides>"
    assert not config.unknown


@pytest.mark.parametrize("text", ["hidden_states", "on", "y", "t", "auto", "null", "~"])
def test_an_option_over_a_bool_is_one_or_the_other_by_the_release(text: str) -> None:
    files = [f"# axolotl {release}\nactivation_offloading: true\n" for release in ("0.14.0", "0.15.0")]
    before, since = (axolotl(file, f"--activation-offloading {text}") for file in files)
    assert (value(before, "activation_offloading"), value(since, "activation_offloading")) == (True, False)
    unknown = axolotl("activation_offloading: true\n", f"--activation-offloading {text}")
    assert "activation_offloading" in unknown.unresolved
    (said,) = [fault.text for fault in unknown.faults]
    assert said == "--activation-offloading is true in Axolotl before 0.15.0, false since"


@pytest.mark.parametrize(
    "option", ["--activation_offloading false", "--no-activation-offloading", "activation_offloading=false"]
)
def test_what_is_no_option_goes_to_the_launcher(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{BASE}sequence_len: 64\nactivation_offloading: true\n")
    script = tmp_path / "train.sh"
    script.write_text(f"axolotl train run.yaml {option}\n")
    config = read([script])
    assert value(config, "activation_offloading") is True
    assert [fault.rule for fault in config.faults] == ["ax-option-unknown"]


def test_an_option_without_its_value_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("axolotl train run.yaml --activation-offloading\n")
    (wrong,) = read([script]).wrong_types
    assert wrong.expected == "a value after the option"


def test_an_unknown_option_is_a_finding() -> None:
    assert [unknown.written for unknown in axolotl("", "--activation-offload").unknown] == [
        "--activation-offload"
    ]


def test_merge_keys_and_anchors() -> None:
    text = "fsdp_config: &f\n  offload_params: true\ngradient_checkpointing_kwargs:\n  <<: {use_reentrant: true}\n"
    config = axolotl(text)
    assert value(config, "gradient_checkpointing_kwargs.use_reentrant") is True


JSON = """{
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 1e-1}
\t},
\t"gradient_clipping": "auto"
}
"""


def test_the_deepspeed_file_is_read_from_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero3.json").write_text(JSON)
    (tmp_path / "config.yml").write_text(BASE + "deepspeed: ds/zero3.json\n")
    config = read([tmp_path / "config.yml"])
    device = config.settings["deepspeed.zero_optimization.offload_optimizer.device"]
    assert (device.value, device.place.line) == ("cpu", 4)
    assert device.place.file.endswith("zero3.json")
    assert value(config, "deepspeed.zero_optimization.offload_optimizer.ratio") == 0.1
    assert value(config, "deepspeed") == "ds/zero3.json"
    assert any(name.endswith("zero3.json") for name in config.sources)


def test_an_inline_section_is_read_the_same_way() -> None:
    config = axolotl("deepspeed:\n  zero_optimization:\n    stage: 2\n    offload_optimizer: {device: cpu}\n")
    assert value(config, "deepspeed.zero_optimization.stage") == 2
    assert value(config, "deepspeed.zero_optimization.offload_optimizer.device") == "cpu"


def test_the_files_that_axolotl_ships_are_known() -> None:
    config = axolotl("deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n")
    assert value(config, "deepspeed.zero_optimization.offload_param.device") == "cpu"
    assert config.settings["deepspeed.zero_optimization.stage"].place.line == 2
    assert not config.unresolved
    assert not config.missing_files


def test_any_other_file_leaves_its_keys_open() -> None:
    config = axolotl("deepspeed: my_zero3.json\n")
    assert "deepspeed.zero_optimization.offload_optimizer.device" in config.maybe_set
    assert [setting.value for setting in config.missing_files] == ["my_zero3.json"]


def test_a_launch_script_leads_to_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(BASE + "micro_batch_size: 1\n")
    script = tmp_path / "train.sh"
    script.write_text("export OMP_NUM_THREADS=8\naxolotl train config.yml --micro-batch-size 4\n")
    config = read([script])
    assert config.framework == "axolotl"
    assert value(config, "micro_batch_size") == 4
    assert value(config, "env.OMP_NUM_THREADS") == "8"


@pytest.mark.parametrize(
    "command",
    [
        "axolotl train --cloud cloud.yaml config.yml --launcher torchrun --micro-batch-size 4 -- --nproc-per-node=8",
        "axolotl preprocess config.yml --debug --debug-num-examples 3 --no-iterable --micro-batch-size 4",
        "accelerate launch --config_file cloud.yaml -m axolotl.cli.train config.yml --prompter x --micro-batch-size 4",
    ],
)
def test_options_of_the_command_and_of_the_launcher_are_no_keys(command: str, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(BASE + "sequence_len: 64\n")
    (tmp_path / "cloud.yaml").write_text("provider: modal\nsequence_len: 32\n")
    script = tmp_path / "train.sh"
    script.write_text(command)
    config = read([script])
    assert (value(config, "sequence_len"), value(config, "micro_batch_size")) == (64, 4)
    assert not config.unknown
    assert not config.faults


@pytest.mark.parametrize("named", ["config.yml", "$1", "${1:-config.yml}", "$CONFIG"])
def test_a_configuration_that_is_not_here_may_set_any_key(named: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"axolotl train {named} --activation-offloading true\n")
    assert "gradient_checkpointing" in read([script]).maybe_set
    assert not [finding.rule for finding in lint(read([script])).findings if finding.severity == "error"]


def test_a_release_from_before_the_known_ones_may_know_any_key() -> None:
    findings = {
        release: [
            finding.rule for finding in lint(axolotl(f"# axolotl=={release}\nrelora_steps: 9\n")).findings
        ]
        for release in ("0.4.1", "0.21.0")
    }
    assert findings == {"0.4.1": [], "0.21.0": ["ax-typo-silent"]}


def test_broken_deepspeed_json_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3')
    (tmp_path / "config.yml").write_text(BASE + "deepspeed: ds.json\n")
    with pytest.raises(UnusableInput, match=r"ds\.json:\d+:\d+ is not valid JSON"):
        read([tmp_path / "config.yml"])


def test_a_preset_counts_as_the_section_that_it_is() -> None:
    config = axolotl("deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n")
    assert "ds-no-zero-section" not in {finding.rule for finding in lint(config).findings}
