# SPDX-License-Identifier: Apache-2.0
"""SimpleTuner's config.json: its framework, and its names as options."""

import json

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

NEEDED = {"model_family": "flux", "model_type": "lora", "data_backend_config": "data.json"}


def config(**settings: object) -> Config:
    return read_text(json.dumps({**NEEDED, **settings}), "config.json")


def found(config: Config, release: str = "4.10.1") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"simpletuner": release}).findings}


@pytest.mark.parametrize("missing", NEEDED)
def test_a_file_without_one_of_the_three_is_nobodys(missing: str) -> None:
    names = {name: value for name, value in NEEDED.items() if name != missing}
    with pytest.raises(Unrecognised):
        read_text(json.dumps({**names, "ramtorch": True}), "config.json")


def test_names_may_have_their_dashes() -> None:
    text = json.dumps({f"--{name}": value for name, value in {**NEEDED, "ramtorch": True}.items()})
    read = read_text(text, "config.json")
    assert (read.framework, read.value("simpletuner.ramtorch", False)) == ("simpletuner", True)


@pytest.mark.parametrize(
    ("given", "is_on"),
    [("false", True), (False, False), ("0", False), (None, True), ("", True), ([False, True], True)],
)
def test_the_text_false_is_passed_over_as_null_is(given: object, is_on: bool) -> None:
    """So a switch that is on unless it is set stays on."""
    assert config(gradient_checkpointing=given).value("simpletuner.gradient_checkpointing", True) is is_on


def test_a_name_that_begins_one_option_is_that_option() -> None:
    assert config(musubi_blocks=3).value("simpletuner.musubi_blocks_to_swap", 0) == 3
    assert found(config(musubi_block=3)) == {"st-unknown-option"}


def test_group_offload_is_an_option_up_to_4_8() -> None:
    given = config(enable_group_offload=True)
    assert (found(given, "4.8.0"), found(given)) == (set(), {"st-group-offload-gone"})


def test_what_older_files_and_the_window_write_is_no_misspelling() -> None:
    assert found(config(validation_steps=100, repeats=3, ez_model_type="x", __active_tab__="model")) == set()
