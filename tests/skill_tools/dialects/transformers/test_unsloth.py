# SPDX-License-Identifier: Apache-2.0
"""Unsloth's two calls, alone in a script and beside a Trainer's arguments."""

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_text, readings
from skill_tools.rules.lint import lint

TRAINER = "from trl import SFTConfig\nargs = SFTConfig(output_dir='o'{})\n"


def script(load: str = "", peft: str = "", trainer: str = "") -> str:
    return (
        f"from unsloth import FastLanguageModel\n{trainer}"
        f"m, t = FastLanguageModel.from_pretrained('a/b'{load})\nm = FastLanguageModel.get_peft_model(m{peft})\n"
    )


def read(text: str) -> Config:
    return read_text(text, "train.py")


def found(text: str) -> set[str]:
    return {each.rule for each in lint(read(text)).findings if each.severity != "info"}


def test_a_trainers_script_is_the_trainers_and_one_without_is_unsloths() -> None:
    (alone,) = readings([Source("train.py", script())])
    (beside,) = readings([Source("train.py", script(trainer=TRAINER.format("")))])
    assert (alone.dialect.name, beside.dialect.name) == ("unsloth", "transformers")
    assert (
        read(script(peft=", offload_layers=8", trainer=TRAINER.format(""))).value(
            "unsloth.peft.offload_layers"
        )
        == 8
    )


def test_true_is_no_number_of_layers_and_false_is_none() -> None:
    assert found(script(load=", offload_layers=True")) == {"us-layers-value"}
    assert found(script(load=", offload_layers=0.5")) == {"us-layers-value"}
    assert found(script(load=", offload_layers=False")) == set()
    assert (
        read(script(load=", offload_layers=None, block_swap_layers=4")).value("unsloth.load.offload_layers")
        == 4
    )


def test_8_bits_are_loaded_by_the_class_that_does_not_refuse_them() -> None:
    """FastLlamaModel refuses them beside swapped layers, but FastLanguageModel hands them on to FastModel."""
    assert found(script(load=", offload_layers=8, load_in_8bit=True")) == set()


def test_a_trainer_that_shards_takes_no_swapped_layers() -> None:
    sharded = TRAINER.format(", deepspeed='zero2.json'")
    assert "us-layers-sharded" in found(script(peft=", offload_layers=8", trainer=sharded))
    assert "us-layers-sharded" not in found(script(trainer=sharded))


def test_a_call_that_is_made_twice_says_nothing() -> None:
    text = script(load=", offload_layers=8, fast_inference=True")
    again = text + "m, t = FastLanguageModel.from_pretrained('c/d')\n"
    assert found(text) == {"us-load-layers-refused"}
    assert found(again) == set()


def test_a_plan_says_which_layers_it_counts_on_the_gpu() -> None:
    config = read(script(peft=", offload_layers=8", trainer=TRAINER.format("")))
    (said,) = registry.named("transformers").remarks(config, None)  # type: ignore[arg-type]
    assert "8 decoder layers" in said
