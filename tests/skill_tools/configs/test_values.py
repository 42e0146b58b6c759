# SPDX-License-Identifier: Apache-2.0
"""A value is brought to its key's type the way its framework does it."""

import pytest

from skill_tools.configs.keys import Key
from skill_tools.configs.values import typed, whole_number


def key(kind: str, **more: tuple[object, ...]) -> Key:
    return Key(name="k", mechanism="model", types={"default": kind}, choices=more.get("choices", ()))


@pytest.mark.parametrize(
    ("kind", "framework", "value", "expected"),
    [
        ("int", "megatron-lm", "4", 4),
        ("int", "megatron-bridge", 1e6, 1_000_000),
        ("float", "axolotl", "2e-5", 2e-5),
        ("float", "megatron-bridge", 1, 1),
        ("bool", "axolotl", "yes", True),
        ("bool", "megatron-bridge", 0, False),
        ("dtype", "megatron-bridge", "torch.bfloat16", "bf16"),
        ("dtype", "megatron-lm", "fp32", "fp32"),
        ("any", "megatron-lm", "3", 3),
        ("any", "megatron-lm", "([0]*3+[1]*12)", "([0]*3+[1]*12)"),
        ("list", "megatron-bridge", ["a"], ["a"]),
        ("str", "megatron-bridge", None, None),
    ],
)
def test_what_fits(kind: str, framework: str, value: object, expected: object) -> None:
    result = typed(key(kind), value, framework, converts_text=framework != "megatron-bridge")
    assert (result.value, type(result.value), result.expected) == (expected, type(expected), None)


@pytest.mark.parametrize(
    ("kind", "framework", "value", "says"),
    [
        ("int", "megatron-bridge", "4", "an integer"),
        ("int", "megatron-lm", "four", "an integer"),
        ("int", "megatron-bridge", True, "an integer"),
        ("int", "megatron-bridge", 1.5, "an integer"),
        ("float", "axolotl", "fast", "a number"),
        ("bool", "megatron-bridge", "true", "true or false"),
        ("bool", "axolotl", 3, "true or false"),
        ("dtype", "megatron-bridge", "half-float", "a dtype such as fp32 or bf16"),
        ("list", "megatron-bridge", "core_attn", "a list"),
        ("str", "megatron-bridge", ["x"], "text"),
        ("dict", "axolotl", "x", "a section"),
    ],
)
def test_what_does_not_fit_is_left_as_it_is(kind: str, framework: str, value: object, says: str) -> None:
    assert typed(key(kind), value, framework, converts_text=framework != "megatron-bridge") == (value, says)


def test_a_closed_vocabulary_names_its_words() -> None:
    chosen = key("str", choices=("full", "selective"))
    assert typed(chosen, "full", "megatron-bridge", converts_text=False).expected is None
    assert typed(chosen, "some", "megatron-bridge", converts_text=False).expected == "one of full, selective"


@pytest.mark.parametrize(
    ("written", "value", "expected"),
    [
        ("disk", "disk", None),
        ("disc", "disc", "one of true, false, disk"),
        (True, True, None),
        ("false", False, None),
    ],
)
def test_a_switch_with_words_of_its_own_takes_quoted_truth_as_pydantic_does(
    written: object, value: object, expected: str | None
) -> None:
    chosen = key("any", choices=(True, False, "disk"))
    assert typed(chosen, written, "axolotl", converts_text=True) == (value, expected)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("08", 8), ("9" * 18, 10**18 - 1), ("9" * 5000, None), ("-1", None), ("²", None)],
)
def test_a_count_in_text_is_decimal_digits(text: str, number: int | None) -> None:
    assert whole_number(text) == number
