# SPDX-License-Identifier: Apache-2.0
"""Files of OneTrainer: a setting's part of the model, and the meaning of a file of an older version."""

import json

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint


def file(**given: object) -> Config:
    data = {"__version": 11, "training_method": "LORA", "model_type": "FLUX_DEV_1", **given}
    return read_text(json.dumps(data, indent=1), "config.json")


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings}


@pytest.mark.parametrize(
    "text",
    [
        '{"training_method": "lora", "model_type": "FLUX_DEV_1"}',
        '{"training_method": "LORA", "model_type": "llama"}',
        '{"training_method": "LORA", "base_model_name": "a/b"}',
    ],
)
def test_names_of_others_prove_nothing(text: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(text, "config.json", framework=None)


def test_a_part_that_the_model_lacks_counts_for_nothing() -> None:
    parts = {"text_encoder_4": {"offload_fraction": 0.5}, "prior": {"offload_fraction": 0.5}}
    assert found(file(**parts, optimizer={"optimizer": "SGD"}, training_method="FINE_TUNE")) == set()
    assert found(file(model_type="HI_DREAM_FULL", **parts)) == {"ot-text-encoder-threads"}


def test_a_finding_is_at_the_part_s_own_line() -> None:
    config = file(
        transformer={"offload_fraction": 0.4, "train": False}, text_encoder_2={"offload_fraction": 0.7}
    )
    setting = config.settings["onetrainer.trained_offload_fraction"]
    assert (setting.written, setting.value, setting.place.line) == (
        "text_encoder_2.offload_fraction",
        0.7,
        10,
    )


def test_a_model_part_that_is_left_out_is_not_set_up() -> None:
    encoder = {"activation_offloading": True, "gradient_checkpointing": False}
    assert found(file(text_encoder_2=encoder)) == {"ot-offload-checkpointing"}
    assert found(file(text_encoder_2={**encoder, "include": False})) == set()
    assert found(file(model_type="QWEN", text_encoder={**encoder, "include": False})) == {
        "ot-offload-checkpointing"
    }


@pytest.mark.parametrize(("version", "expected"), [(10, 0.6), (5, 0.6), (4, 0.0)])
def test_an_older_file_offloads_all_parts_if_its_checkpoints_are_on_the_host(
    version: int, expected: float
) -> None:
    config = file(
        __version=version,
        gradient_checkpointing="CPU_OFFLOADED",
        layer_offload_fraction=0.6,
        transformer={"weight_dtype": "BFLOAT_16", "offload_fraction": 0.9},
        prior={},
    )
    assert config.value("transformer.offload_fraction") == expected


@pytest.mark.parametrize(
    ("version", "own", "expected"),
    [(9, "NONE", "FLOAT_16"), (8, "NONE", "FLOAT_16"), (9, "FLOAT_8", "FLOAT_8"), (10, "NONE", "NONE")],
)
def test_a_part_without_a_dtype_has_that_of_the_model_before_version_10(
    version: int, own: str, expected: str
) -> None:
    part = {"weight_dtype": own}
    config = file(
        __version=version, weight_dtype="FLOAT_16", **{"prior" if version < 9 else "transformer": part}
    )
    assert config.value("transformer.weight_dtype") == expected


def test_what_a_preset_leaves_to_the_window_is_not_known() -> None:
    text = json.dumps(
        {
            "training_method": "FINE_TUNE",
            "model_type": "QWEN",
            "transformer": {"offload_fraction": 0.8},
            "optimizer": {"optimizer": "ADAFACTOR"},
            "optimizer_defaults": {"ADAFACTOR": {"optimizer": "ADAFACTOR", "fused_back_pass": True}},
        }
    )
    verdict = lint(read_text(text, "preset.json"))
    assert "ot-fused-back-pass" in {each.rule for each in verdict.undecided}
    assert not verdict.findings


def test_a_share_that_is_no_number_is_dropped_and_said() -> None:
    assert found(file(transformer={"offload_fraction": "60%"})) == {"ot-not-set"}
