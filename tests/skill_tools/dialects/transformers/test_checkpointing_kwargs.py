# SPDX-License-Identifier: Apache-2.0
"""The keywords of checkpointing, which nobody converts on their way to torch."""

from skill_tools.dialects.read import read_text


def test_nobody_converts_the_keywords_of_checkpointing() -> None:
    for more, refused, unknown in (
        ("", 0, 0),
        (', "every_n_layers": "2"', 1, 0),
        (', "every_n_layers": 0', 1, 0),
        (', "every_n_layers": 2', 0, 0),
        (', "ofload": True', 0, 1),
    ):
        kwargs = f'activation_checkpointing_kwargs={{"offload": "false"{more}}}'
        script = f"from trl import SFTConfig\nargs = SFTConfig(activation_checkpointing=True, {kwargs})\n"
        config = read_text(script, "train.py")
        assert config.value("activation_checkpointing_kwargs.offload") is True
        assert (len(config.wrong_types), len(config.unknown)) == (refused, unknown), more


def test_a_text_in_python_is_true_whatever_it_says() -> None:
    for text in ("no", "false", "off"):
        call = f"activation_checkpointing='{text}', activation_checkpointing_kwargs={{'offload': True}}"
        config = read_text(
            f"from transformers import TrainingArguments\nargs = TrainingArguments('out', {call})\n",
            "train.py",
        )
        assert config.value("activation_checkpointing") is True, text
