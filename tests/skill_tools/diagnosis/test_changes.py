# SPDX-License-Identifier: Apache-2.0
"""A message advises settings of the run's own framework, and its own lint accepts them."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from for_each import for_each

from skill_tools import knowledge
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.diagnosis import symptoms
from skill_tools.diagnosis.changes import load_changes, told
from skill_tools.dialects import registry
from skill_tools.rules.finding import Severity
from skill_tools.rules.lint import lint

ENTRIES = [entry for entry in knowledge.load_messages() if entry["role"] != "chatter"]
ENTRIES += [
    {"id": symptom["symptom"], **cause}
    for symptom in knowledge.load_yaml("symptoms.yaml")
    for cause in symptom["causes"]
]
ENTRIES += [{"id": each["where"], **each} for each in knowledge.load_yaml("residency.yaml")]
# A fault that needs words of one framework is told to nobody else.
ENTRIES += [
    {"id": each["fault"], **each}
    for each in knowledge.load_yaml("numbers.yaml")["faults"]
    if "needs" not in each
]
DIALECTS = [dialect.name for dialect in registry.with_files()]
FORMS = [(change, name) for change, known in load_changes().items() for name in known.settings]
# A key is written with a dot or an underscore, and something is assigned to it.
_ASSIGNED = re.compile(r"(?<![\w.-])(?:--)?([A-Za-z]\w*(?:[._]\w+)+)\"?(?: ?= ?|: )(?=[\w\"{])")

_CODE = re.compile(
    r"'[^']*'|\w+\([^()]*\)"
)  # a command, a call: torch's own interface, which is nobody's configuration


@cache
def spelled_in(dialect: str) -> set[str]:
    """Every name that a user of a dialect may write, and the last part of each."""
    names = {
        key.spelling[name]
        for key in load_keys().values()
        for name in (dialect, *embedded(dialect))
        if name in key.spelling
    }
    names |= set(knowledge.names(dialect))
    return (
        names
        | {name.rpartition(".")[2] for name in names}
        | {name.lstrip("-+").replace("-", "_") for name in names}
    )


def embedded(dialect: str) -> tuple[str, ...]:
    return registry.named(dialect).embeds


@for_each(DIALECTS)
def test_no_message_tells_a_user_another_framework_s_key(dialect: str) -> None:
    own = spelled_in(dialect)
    everywhere = {name for other in DIALECTS for name in spelled_in(other)}
    for entry in ENTRIES:
        if entry.get("of", dialect) != dialect:
            continue
        for change in entry["change"]:
            text = _CODE.sub("", told(change, (dialect,)))
            foreign = {name for name in _ASSIGNED.findall(text) if name in everywhere and name not in own}
            assert not foreign, (entry["id"], text)


@for_each(FORMS)
def test_each_setting_is_one_that_the_framework_s_lint_accepts(form: tuple[str, str]) -> None:
    change, dialect = form
    settings = load_changes()[change].settings[dialect]
    of = registry.named(dialect)
    written = re.split("[:= ]", told(change, (dialect,)))[0]
    assert load_keys()[next(iter(settings))].spelling[dialect].endswith(written)
    for key, value in settings.items():
        assert dialect in load_keys()[key].spelling, f"{dialect} does not spell {key}"
        text = text_of(dialect, {key: value})
        config = of.compose([Source(of.example_file, text)], [])
        assert config.value(key) == value or (value == "none" and config.value(key) in (None, "none")), text
        wrong = [
            each.rule
            for each in lint(config).findings
            if each.severity is Severity.ERROR and "unknown" in each.rule
        ]
        assert not wrong, text
        assert not config.unknown
        assert not config.wrong_types


def text_of(dialect: str, settings: Mapping[str, object]) -> str:
    """A file of the dialect with nothing else in it; a script's settings are its words."""
    of = registry.named(dialect)
    if of.example_file.endswith(".sh"):
        words = " ".join(
            of.spelled({key: value}, None).popitem()[0] + _word(value, of.assigns)
            for key, value in settings.items()
        )
        return SCRIPTS[dialect] + f" {words}\n"
    if of.example_file.endswith(".json"):
        nested: dict[str, Any] = {}
        for key, value in of.spelled(settings, None).items():
            place = nested
            *sections, name = key.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return json.dumps(nested)
    if of.reads_toml:
        return "\n".join(f"{key} = {json.dumps(value)}" for key, value in of.spelled(settings, None).items())
    patch = of.patch(settings)
    return patch.text or "\n".join(_as_yaml(line) for line in patch.overrides.split())


SCRIPTS = {
    "megatron-lm": "torchrun pretrain_gpt.py",
    "ms-swift": "swift sft",
    "verl": "python3 -m verl.trainer.main_ppo",
}


def _word(value: object, assigns: str) -> str:
    return "" if value is True else f"{assigns}{str(value).lower()}"


def _as_yaml(assigned: str) -> str:
    """A dotted override as YAML."""
    name, _, value = assigned.partition("=")
    *sections, last = name.split(".")
    return (
        "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
        + f"{'  ' * len(sections)}{last}: {value}"
    )


def test_of_several_settings_those_are_told_that_the_run_has() -> None:
    deepspeed = registry.named("deepspeed")
    config = deepspeed.compose(
        [Source("ds.json", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')], []
    )
    text = told("offload-less", ("deepspeed",), config)
    assert "offload_optimizer.device: none" in text
    assert "offload_param" not in text
    without = deepspeed.compose([Source("ds.json", '{"zero_optimization": {"stage": 3}}')], [])
    assert "device" not in told("offload-less", ("deepspeed",), without)


def test_where_no_framework_is_known_words_tell_it() -> None:
    assert told("unpin", ()) == load_changes()["unpin"].words
    assert told("some words", ("deepspeed",)) == "some words"


def test_the_words_of_changes_name_no_key() -> None:
    for name, change in load_changes().items():
        assert not re.search(r"\w_\w", change.words.replace("cpu:gloo", "")), name


def test_every_change_is_advised_by_some_message_or_owner() -> None:
    advised = {change for entry in ENTRIES for change in entry["change"]}
    folder = Path(__file__).parents[3] / "skill_tools" / "diagnosis"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert {name for name in load_changes() if name not in advised and f'"{name}"' not in source} == set()


def test_what_a_strategy_or_a_shipped_file_brings_is_no_setting_of_its_name() -> None:
    lightning, swift = registry.named("lightning"), registry.named("ms-swift")
    script = "import lightning as L\nL.Trainer(strategy='deepspeed_stage_3_offload', devices=4).fit(model)\n"
    by_strategy = lightning.compose([Source("train.py", script)], [])
    assert told("offload-less", ("lightning", "deepspeed"), by_strategy).endswith(
        load_changes()["offload-less"].words
    )
    by_name = swift.compose([Source("run.sh", "swift sft --model m --deepspeed zero3_offload\n")], [])
    text = told("offload-less", ("ms-swift", "deepspeed"), by_name)
    assert "offload_optimizer.device: none" in text or text.startswith("less")


@pytest.mark.parametrize(
    ("text", "offload"),
    [
        ('--fsdp "full_shard auto_wrap offload"', "params"),
        ("deepspeed: examples/deepspeed/ds_z3_offload_config.json", "optimizer"),
        ("--deepspeed zero2_offload.json", "optimizer"),
    ],
)
def test_an_offload_is_read_from_the_name_that_its_file_or_option_has(text: str, offload: str) -> None:
    assert offload in symptoms.running([("run.sh", text)], None, None)
