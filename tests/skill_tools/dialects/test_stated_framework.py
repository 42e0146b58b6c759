# SPDX-License-Identifier: Apache-2.0
"""A file of one framework that is stated to be another's is refused: "no findings" would say that it is in order."""

import re

import pytest
from rule_examples import CASES

from skill_tools.configs.source import Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_sources, recognised
from skill_tools.errors import UnusableInput

MEGATRON_LM = (
    "torchrun pretrain_gpt.py --num-layers 32 --optimizer-cpu-offload --use-precision-aware-optimizer\n"
)
# Made from one another, so that a script of one may be meant for the other.
OF_MEGATRON_LM = {"megatron-lm", "mindspeed-llm", "slime", "miles"}
# Launchers, sections and wrappers of a loop: their files may be another's all the same.
BESIDE_OTHERS = {"accelerate", "deepspeed", "fsdp1", "fsdp2", "lightning", "unsloth"}


def test_every_example_is_refused_as_another_framework_s() -> None:
    examples = {
        (rule.examples[framework].filename, text): framework
        for rule, framework in CASES
        for text in (rule.examples[framework].bad, rule.examples[framework].good)
        if rule.examples[framework].filename != "<overrides>"
    }
    taken: dict[tuple[str, str], int] = {}
    asked = 0
    for (filename, text), framework in examples.items():
        source = Source(filename, text)
        try:
            dialect, evidence = recognised([source])
        except UnusableInput:
            continue  # of nobody, or of two at once: the user's to state
        if evidence.yields or dialect.name in BESIDE_OTHERS:
            continue
        for other in registry.with_files():
            of_one_family = {dialect.name, other.name} <= OF_MEGATRON_LM
            if other.name in (dialect.name, framework) or of_one_family:
                continue
            asked += 1
            try:
                read_sources([source], framework=other.name)
            except UnusableInput:
                continue
            taken[(dialect.name, other.name)] = taken.get((dialect.name, other.name), 0) + 1
    assert asked > 30_000
    assert not taken, taken


def test_the_refusal_says_whose_it_is_and_by_what() -> None:
    with pytest.raises(UnusableInput, match=r"run\.sh is no configuration of verl") as refused:
        read_sources([Source("run.sh", MEGATRON_LM)], framework="verl")
    assert refused.value.expected == (
        "--framework megatron-lm, by its own words "
        "(pretrain_gpt.py, --optimizer-cpu-offload, --use-precision-aware-optimizer)"
    )
    assert refused.value.attempt == "--framework megatron-lm, or none"


@pytest.mark.parametrize("text", ["accelerate launch train.py --lr 1\n", "python serve.py --port 8000\n"])
def test_a_script_of_nobody_holds_nothing_of_the_stated_framework(text: str) -> None:
    with pytest.raises(UnusableInput, match=r"run\.sh holds nothing that verl reads") as refused:
        read_sources([Source("run.sh", text)], framework="verl")
    assert re.search("verl.trainer|actor_rollout_ref", refused.value.expected)


def test_a_fork_s_options_may_be_stated_to_be_its_own() -> None:
    for framework in OF_MEGATRON_LM:
        assert read_sources([Source("run.sh", MEGATRON_LM)], framework=framework).settings
    launched = "accelerate launch my_trainer.py --gradient_checkpointing --blocks_to_swap 8\n"
    assert read_sources([Source("run.sh", launched)], framework="sd-scripts").settings


@pytest.mark.parametrize("dialect", [each.name for each in registry.with_files()])
@pytest.mark.parametrize(
    ("filename", "text"), [("x.yaml", "greeting: 1\nnest: {y: 2}\n"), ("x.json", '{"greeting": 1}')]
)
def test_a_file_of_nobody_is_refused_or_its_keys_are_told_to_be_unknown(
    dialect: str, filename: str, text: str
) -> None:
    try:
        config = read_sources([Source(filename, text)], framework=dialect)
    except UnusableInput:
        return
    assert config.unknown, "no findings: it would be in order"


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        ("transformers", "learning_rate: 1.0e-5\n"),  # accepted, though no rule asks for it
        ("musubi-tuner", "blocks_to_swap = 8\n"),
        ("nemo-rl", "policy: {model_name: a/b}\n"),
        ("torchtune", "fsdp_cpu_offload: true\n"),
        ("deepspeed", "{}"),  # all at its default
    ],
)
def test_one_name_of_the_stated_framework_is_enough(framework: str, text: str) -> None:
    filename = "x.json" if text == "{}" else "x.toml" if " = " in text else "x.yaml"
    assert read_sources([Source(filename, text)], framework=framework).framework == framework


def test_a_file_without_proof_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = registry.named("transformers")
    composed: list[object] = []
    compose = type(dialect).compose

    def counting(self: object, sources: object, overrides: object) -> object:
        composed.append(sources)
        return compose(self, sources, overrides)  # type: ignore[arg-type]

    monkeypatch.setattr(type(dialect), "compose", counting)
    read_sources([Source("x.yaml", "learning_rate: 1.0e-5\n")], framework="transformers")
    assert len(composed) == 1
