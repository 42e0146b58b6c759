# SPDX-License-Identifier: Apache-2.0
"""The dict that a script gives `deepspeed.initialize`: judged as the JSON is."""

import json
from pathlib import Path

import pytest

from skill_tools import knowledge
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_text, readings
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

SCRIPT = "import deepspeed\n\n{}\nengine, *_ = deepspeed.initialize(model=model, config=config)\n"
ZERO = "deepspeed.zero_optimization"
_OF_TEXT_ALONE = {
    "ds-duplicate-key",
    "ds-json-comments",
}  # a dict has neither two of a key nor comments of JSON


def found(text: str, name: str, versions: dict[str, str]) -> set[str]:
    verdict = lint(read_text(text, name), versions=versions)
    return {each.rule for each in verdict.findings} - _OF_TEXT_ALONE


@pytest.mark.parametrize("side", ["bad", "good"])
def test_a_dict_is_judged_as_the_json_of_each_example(side: str) -> None:
    compared = 0
    for examples in knowledge.examples().values():
        example = examples.get("deepspeed", {})
        try:
            config = json.loads(example.get(side, ""))
        except ValueError:  # a launch line, or more than JSON
            continue
        versions = example.get("versions", {})
        script = SCRIPT.format(f"config = {config!r}")
        assert found(script, "train.py", versions) == found(json.dumps(config), "ds.json", versions)
        compared += 1
    assert compared > 50


def test_places_are_those_of_the_dict() -> None:
    text = SCRIPT.format('config = {\n    "zero_optimization": {\n        "stage": 2,\n    },\n}')
    assert read_text(text, "train.py").settings[f"{ZERO}.stage"].place.line == 5


def test_what_is_computed_is_not_known_and_the_rest_is() -> None:
    config = read_text(
        SCRIPT.format('config = {"zero_optimization": {"stage": STAGE}, "steps_per_print": 9}'), "a.py"
    )
    assert f"{ZERO}.stage" in config.unresolved
    assert config.value("deepspeed.steps_per_print") == 9


def test_code_that_is_given_the_dict_may_change_it() -> None:
    config = read_text(SCRIPT.format('config = {"zero_optimization": {"stage": 2}}\nfill_in(config)'), "a.py")
    assert config.value(f"{ZERO}.stage") is None
    assert f"{ZERO}.stage" in config.maybe_set


def test_a_dict_that_holds_itself_is_not_known() -> None:
    config = read_text(
        SCRIPT.format('config = {"zero_optimization": {"stage": 2}}\nconfig["me"] = config'), "a.py"
    )
    assert f"{ZERO}.stage" in config.maybe_set


def test_a_function_of_the_file_may_make_it() -> None:
    text = SCRIPT.format(
        'def made(stage):\n    return {"zero_optimization": {"stage": stage}}\n\nconfig = made(3)'
    )
    assert read_text(text, "train.py").value(f"{ZERO}.stage") == 3


def test_a_path_is_followed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "train.py").write_text(SCRIPT.format('config = "ds.json"'))
    assert read([tmp_path / "train.py"]).value(f"{ZERO}.stage") == 1


def test_each_engine_is_a_configuration_of_its_own() -> None:
    text = SCRIPT.format('config = {"zero_optimization": {"stage": 1}}') + (
        'other, *_ = deepspeed.initialize(model=ref, config_params={"zero_optimization": {"stage": 3}})\n'
    )
    held = [each.compose().value(f"{ZERO}.stage") for each in readings([Source("train.py", text)])]
    assert held == [1, 3]
    with pytest.raises(Unrecognised, match="makes 2 engines"):
        read_text(text, "train.py")


@pytest.mark.parametrize(
    "config", ["json.load(open('ds.json'))", "None", "args.deepspeed_config", "{**unknown}"]
)
def test_a_configuration_that_is_read_elsewhere_is_none(config: str) -> None:
    with pytest.raises(Unrecognised):
        readings([Source("train.py", SCRIPT.format(f"config = {config}"))])


def test_a_trainer_s_script_stays_the_trainer_s() -> None:
    text = SCRIPT.format(
        "from transformers import TrainingArguments\nconfig = {'zero_optimization': {'stage': 1}}"
    )
    text += "arguments = TrainingArguments('out', gradient_checkpointing=True)\n"
    assert read_text(text, "train.py").framework == "transformers"
