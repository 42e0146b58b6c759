# SPDX-License-Identifier: Apache-2.0
"""ms-swift's arguments: two programs, presets, files and JSON that they name."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.rules.lint import lint

MODEL = "--model Qwen/Qwen3-8B --dataset my"


def swift(text: str, name: str = "run.sh") -> Config:
    config = read_text(text, name)
    assert config.framework == "ms-swift"
    return config


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config, versions={"ms-swift": "4.6.0"}).findings}


def test_an_argument_that_newer_releases_lack_is_said_where_no_release_is() -> None:
    config = swift(f"swift sft {MODEL} --train_type lora\n")
    (gone,) = [each for each in lint(config).findings if each.rule == "sw-key-release"]
    assert gone.depends_on == ("ms-swift>=4.1.3",)
    assert "sw-key-release" not in {
        each.rule for each in lint(config, versions={"ms-swift": "4.0.4"}).findings
    }


def test_arguments_are_typed() -> None:
    config = swift(f"swift sft {MODEL} --save_only_model true --gradient_checkpointing false\n")
    assert config.value("swift.save_only_model") is True
    assert config.value("swift.gradient_checkpointing") is False
    assert config.model_name == "Qwen/Qwen3-8B"


def test_the_two_programs_take_their_own_arguments() -> None:
    assert found(swift(f"swift sft {MODEL} --optimizer_cpu_offload true\n")) == {"sw-unknown-key"}
    assert found(swift(f"megatron sft {MODEL} --per_device_train_batch_size 1\n")) == {"sw-unknown-key"}


def test_a_flag_may_be_cut_short_where_one_fits() -> None:
    config = swift(f"megatron sft {MODEL} --optimizer_offload_frac 0.5 --optimizer_cpu_offload true\n")
    assert config.value("optimizer_offload_fraction") == 0.5
    assert not config.unknown


def test_a_plugin_in_python_is_no_program() -> None:
    config = swift(f"megatron rlhf --rlhf_type grpo {MODEL} --external_plugins plugin.py --lr 1e-6\n")
    assert config.value("swift.rlhf_type") == "grpo"
    assert not config.unknown


def test_behind_a_launcher_the_path_tells_the_program() -> None:
    config = swift(
        f"torchrun --nproc_per_node 8 swift/cli/_megatron/sft.py {MODEL} --optimizer_cpu_offload true\n"
    )
    assert config.value("optimizer_cpu_offload") is True


def test_options_before_a_program_of_the_user_s_own_are_the_launcher_s() -> None:
    config = read_text(
        f"torchrun --nproc_per_node 8 --master_port 1 patched.py {MODEL} --tuner_type full --fsdp fsdp2\n",
        "run.sh",
        framework="ms-swift",
    )
    assert not config.unknown
    assert config.value("swift.fsdp")


def test_a_command_in_a_container_is_read_and_a_report_s_is_not() -> None:
    inner = f"cd a && A=1 swift sft {MODEL} --fsdp fsdp2"
    config = swift(
        f'docker exec a bash -lc "{inner}" | tee log\npython3 report.py --model a --dataset b --gbs 8\n'
    )
    assert not config.unknown
    assert config.value("swift.fsdp")


@pytest.mark.parametrize(("preset", "stage", "device"), [("zero2_offload", 2, "cpu"), ("zero3", 3, None)])
def test_the_files_that_ms_swift_ships_are_known(preset: str, stage: int, device: str | None) -> None:
    config = swift(f"swift sft {MODEL} --deepspeed {preset}\n")
    assert config.value("deepspeed.zero_optimization.stage") == stage
    assert config.value("deepspeed.zero_optimization.offload_optimizer.device") == device


def test_deepspeeds_rules_read_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    (tmp_path / "run.sh").write_text(f"swift sft {MODEL} --deepspeed ds.json\n", encoding="utf-8")
    stage = read([tmp_path / "run.sh"]).settings["deepspeed.zero_optimization.stage"]
    assert (stage.value, Path(stage.place.file).name) == (3, "ds.json")


def test_a_file_that_is_not_here_leaves_its_section_open() -> None:
    config = swift(f"swift sft {MODEL} --deepspeed my.json --fsdp other.json\n")
    assert "deepspeed.zero_optimization.stage" in config.maybe_set
    assert "swift.fsdp_config.state_dict_type" in config.maybe_set
    assert [setting.value for setting in config.missing_files] == ["my.json", "other.json"]


def test_an_fsdp_file_alone_is_read() -> None:
    text = '{"_note": "x", "fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_cpu_offload": true}}'
    assert "sw-aco-no-version" in found(swift(text, "fsdp2.json"))


def test_yaml_of_the_same_arguments() -> None:
    text = "model: Qwen/Qwen3-8B\ndataset: my\ntuner_type: full\nfsdp: fsdp2\nsave_only_model: true\n"
    assert "sw-fsdp2-save-only" in found(swift(text, "sft.yaml"))


def test_a_named_yaml_lies_below_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model: m\ndataset: d\ngradient_checkpointing: true\n", encoding="utf-8"
    )
    (tmp_path / "run.sh").write_text("swift sft sft.yaml --gradient_checkpointing false\n", encoding="utf-8")
    config = read([tmp_path / "run.sh"])
    assert config.value("swift.gradient_checkpointing") is False
    assert config.model_name == "m"


def test_processes_are_counted_where_the_script_says_them() -> None:
    assert swift(f"CUDA_VISIBLE_DEVICES=0,1 swift sft {MODEL}\n").value("swift.devices_per_process") == 2
    two = f"CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft {MODEL}\n"
    assert swift(two).value("swift.devices_per_process") == 1
    launched = f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 swift/cli/sft.py {MODEL}\n"
    assert swift(launched).value("swift.devices_per_process") is None


def test_megatrons_own_rules_have_ms_swifts_defaults() -> None:
    config = swift(f"megatron sft {MODEL} --optimizer_cpu_offload true\n")
    rules = found(config)
    assert {"sw-hdo-masters", "sw-mcore-fraction"} <= rules
    assert not rules & {"oc-fraction-zero", "oc-mlm-port-fraction", "oc-precision-aware-missing-bridge"}
    assert "oc-no-overlap" not in rules, "ms-swift has no argument for the overlap"


def test_extra_kwargs_go_to_the_model() -> None:
    extra = """--megatron_extra_kwargs '{"cpu_offloading": true, "cpu_offloading_num_layers": 2}'"""
    assert "la-recompute" in found(swift(f"megatron sft {MODEL} {extra}\n"))


def test_a_file_becomes_text_on_the_command_line() -> None:
    base = "model: some/model\ntuner_type: lora\ndataset: a.jsonl\n"
    for name in ("gradient_checkpointing", "deepspeed"):
        (refused,) = read_text(f"{base}{name}: null\n", "config.yaml").wrong_types
        assert refused.setting.value == "None", name
    text = f"{base}max_grad_norm: null\ngradient_checkpointing: on\n"
    config = read_text(f"{text}save_only_model: 'on'\ntarget_modules: [1]\n", "config.yaml")
    wrong = [each.setting.key for each in config.wrong_types]
    assert wrong == ["--max_grad_norm", "swift.save_only_model", "--target_modules"]
    assert config.value("swift.gradient_checkpointing") is True


def test_from_4_6_on_a_list_in_a_file_becomes_text_too() -> None:
    text = "model: some/model\ntuner_type: lora\ndataset: a.jsonl\ntarget_modules: [1, null]\n"
    refused = {
        release: bool(read_text(f"# ms-swift {release}\n{text}", "config.yaml").wrong_types)
        for release in ("4.5.3", "4.6.0")
    }
    assert refused == {"4.5.3": True, "4.6.0": False}
    assert "before ms-swift 4.6" in read_text(text, "config.yaml").wrong_types[0].expected
