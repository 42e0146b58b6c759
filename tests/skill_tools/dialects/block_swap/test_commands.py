# SPDX-License-Identifier: Apache-2.0
"""Commands and TOML of musubi-tuner and sd-scripts: their framework, and the one of two values that counts."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

WAN = "accelerate launch --mixed_precision bf16 src/musubi_tuner/wan_train_network.py"
FLUX = "accelerate launch flux_train_network.py --pretrained_model_name_or_path f --network_module networks.lora_flux"


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings}


@pytest.mark.parametrize(
    ("command", "framework", "program"),
    [
        (f"{WAN} --dit w.safetensors", "musubi-tuner", "wan_train_network"),
        ("accelerate launch -m musubi_tuner.hv_train --dit w", "musubi-tuner", "hv_train"),
        ("python qwen_image_train.py --dit w --dataset_config d", "musubi-tuner", "qwen_image_train"),
        (FLUX, "sd-scripts", "flux_train_network"),
        ("python ./fine_tune.py --in_json m.json --train_data_dir d", "sd-scripts", "fine_tune"),
    ],
)
def test_a_program_and_an_option_of_its_own_prove_it(command: str, framework: str, program: str) -> None:
    config = read_text(f"{command}\n", "run.sh")
    assert config.framework == framework
    assert config.value(f"{framework.partition('-')[0]}.program") == program


@pytest.mark.parametrize(
    "command",
    [
        "python train_text_to_image.py --pretrained_model_name_or_path a --train_data_dir d",
        "python train_network.py --epochs 3 --lr 0.1",
        "python wan_train.py --epochs 3",
        "python my_flux_train.py --dataset_config d",
    ],
)
def test_a_name_that_others_have_too_proves_nothing(command: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(f"{command}\n", "run.sh", framework=None)


def test_the_issue_s_own_command_stops_before_it_loads_anything() -> None:
    text = f"{WAN} --mixed_precision bf16 --dit w --sdpa --blocks_to_swap 36 --block_swap_h2d_only\n"
    assert found(read_text(text, "run.sh")) == {"mt-h2d-checkpointing"}


def test_the_command_wins_over_the_toml_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "wan.toml").write_text(
        "dit = 'w'\nsdpa = true\n[memory]\nblocks_to_swap = 45\n", encoding="utf-8"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"{WAN} --mixed_precision bf16 --config_file wan\n", encoding="utf-8")
    config = read([script])
    assert config.value("blocks_to_swap") == 45
    assert config.settings["blocks_to_swap"].place.line == 4
    assert found(config) == {"mt-swap-range"}
    script.write_text(
        f"{WAN} --mixed_precision bf16 --config_file wan.toml --blocks_to_swap 20\n", encoding="utf-8"
    )
    assert found(read([script])) == set()


def test_a_toml_that_is_not_here_may_set_anything(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{WAN} --mixed_precision bf16 --dit w --config_file gone\n", encoding="utf-8")
    config = read([script])
    assert [each.value for each in config.missing_files] == ["gone.toml"]
    assert found(config) == set()


def test_the_program_of_a_toml_alone_is_not_known() -> None:
    config = read_text("dit = 'w'\nsdpa = true\nblocks_to_swap = 45\n", "wan.toml")
    verdict = lint(config)
    assert not verdict.findings
    assert "mt-swap-range" in {each.rule for each in verdict.undecided}


def test_argparse_lets_an_option_be_cut_short() -> None:
    config = read_text(f"{FLUX} --blocks_to 18 --cpu_offload_c --gradient_checkpoint\n", "run.sh")
    assert not config.unknown
    assert found(config) == {"ss-swap-checkpoints"}


def test_a_unet_takes_no_checkpoints_to_the_host() -> None:
    text = (
        FLUX.replace("flux_train", "sdxl_train") + " --gradient_checkpointing --cpu_offload_checkpointing\n"
    )
    assert found(read_text(text, "run.sh")) == {"ss-checkpoints-unsupported"}


def test_an_option_of_another_program_ends_the_run() -> None:
    text = FLUX.replace("flux_train", "sdxl_train") + " --blocks_to_swap 8\n"
    assert found(read_text(text, "run.sh")) == {"ss-unknown-option"}
    fork = FLUX.replace("flux_train_network", "my_own_train") + " --train_data_dir d --blocks_to_swap 8\n"
    assert "ss-unknown-option" not in found(read_text(fork, "run.sh", framework="sd-scripts"))
