"""A value is brought to its key's type the way its framework does it."""

import pytest

from skill_tools.configs.config import Framework
from skill_tools.configs.keys import Key
from skill_tools.configs.values import typed


def key(kind: str, **more: tuple[object, ...]) -> Key:
    return Key(name="k", mechanism="model", types={"default": kind}, choices=more.get("choices", ()))


@pytest.mark.parametrize(
    ("kind", "framework", "value", "expected"),
    [
        ("int", Framework.MEGATRON_LM, "4", 4),
        ("int", Framework.BRIDGE, 1e6, 1_000_000),
        ("float", Framework.AXOLOTL, "2e-5", 2e-5),
        ("float", Framework.BRIDGE, 1, 1),
        ("bool", Framework.AXOLOTL, "yes", True),
        ("bool", Framework.BRIDGE, 0, False),
        ("dtype", Framework.BRIDGE, "torch.bfloat16", "bf16"),
        ("dtype", Framework.MEGATRON_LM, "fp32", "fp32"),
        ("any", Framework.MEGATRON_LM, "3", 3),
        ("any", Framework.MEGATRON_LM, "([0]*3+[1]*12)", "([0]*3+[1]*12)"),
        ("list", Framework.BRIDGE, ["a"], ["a"]),
        ("str", Framework.BRIDGE, None, None),
    ],
)
def test_what_fits(kind: str, framework: Framework, value: object, expected: object) -> None:
    result = typed(key(kind), value, framework)
    assert (result.value, type(result.value), result.expected) == (expected, type(expected), None)


@pytest.mark.parametrize(
    ("kind", "framework", "value", "says"),
    [
        ("int", Framework.BRIDGE, "4", "an integer"),
        ("int", Framework.MEGATRON_LM, "four", "an integer"),
        ("int", Framework.BRIDGE, True, "an integer"),
        ("int", Framework.BRIDGE, 1.5, "an integer"),
        ("float", Framework.AXOLOTL, "fast", "a number"),
        ("bool", Framework.BRIDGE, "true", "true or false"),
        ("bool", Framework.AXOLOTL, 3, "true or false"),
        ("dtype", Framework.BRIDGE, "half-float", "a dtype such as fp32 or bf16"),
        ("list", Framework.BRIDGE, "core_attn", "a list"),
        ("str", Framework.BRIDGE, ["x"], "text"),
        ("dict", Framework.AXOLOTL, "x", "a section"),
    ],
)
def test_what_does_not_fit_is_left_as_it_is(
    kind: str, framework: Framework, value: object, says: str
) -> None:
    assert typed(key(kind), value, framework) == (value, says)


def test_a_closed_vocabulary_names_its_words() -> None:
    chosen = key("str", choices=("full", "selective"))
    assert typed(chosen, "full", Framework.BRIDGE).expected is None
    assert typed(chosen, "some", Framework.BRIDGE).expected == "one of full, selective"


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
    assert typed(chosen, written, Framework.AXOLOTL) == (value, expected)
