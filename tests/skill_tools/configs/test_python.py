# SPDX-License-Identifier: Apache-2.0
"""Python is read, never run: the arguments of a file's objects are known as far as its own text tells."""

import pytest

from skill_tools.configs.python.constructions import Construction, constructions
from skill_tools.configs.source import Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.errors import UnusableInput


def built(text: str) -> list[Construction]:
    return constructions(Source("train.py", text), {"TrainingArguments"})


def fields(text: str) -> dict[str, object]:
    (only,) = built(text)
    return {name: value for name, value, _ in only.values()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TrainingArguments(optim='adamw', lr=2e-5)", {"optim": "adamw", "lr": 2e-5}),
        ("N = 4\ntransformers.TrainingArguments(steps=N * 2)", {"steps": 8}),
        ("from conf import N\nTrainingArguments(steps=N, x=int(N))", {"steps": UNREADABLE, "x": UNREADABLE}),
        ("def train(lr=1e-3):\n    return TrainingArguments(lr=lr)", {"lr": UNREADABLE}),
        ("def train(lr=1e-3):\n    return TrainingArguments(lr=lr)\ntrain()", {"lr": 1e-3}),
        (
            "class T:\n    def go(self, b):\n        TrainingArguments(a=b, c=True)",
            {"a": UNREADABLE, "c": True},
        ),
        ("a = TrainingArguments(x=1)\na.x = 2", {"x": 2}),
        ("a = TrainingArguments(x=1)\nif on():\n    a.x = 2", {"x": UNREADABLE}),
        ("more = dict(x=1)\nTrainingArguments(**more, y={'z': [2]})", {"x": 1, "y": {"z": [2]}}),
        ("args = parser.parse_args()\nTrainingArguments(x=args.x)", {"x": UNREADABLE}),
        ("if __name__ == '__main__':\n    TrainingArguments(x=1)", {"x": 1}),
        (
            "@dataclass\nclass A:\n    x: int = 3\n    y: list = field(default_factory=list)\n"
            "    z: int = field(default=5)\n"
            "a = A()\nTrainingArguments(x=a.x, y=a.y, z=a.z)",
            {"x": 3, "y": UNREADABLE, "z": 5},
        ),
        ("class Mine(TrainingArguments):\n    x: int = 3\nMine(y=4)", {"x": 3, "y": 4}),
        ("for x in (1, 2):\n    TrainingArguments(x=x)", {"x": 2}),
        (
            "async def f():\n    async with y:\n        pass\n    TrainingArguments(x=f'{1}')",
            {"x": UNREADABLE},
        ),
    ],
)
def test_what_an_object_is_given(text: str, expected: dict[str, object]) -> None:
    assert fields(text) == expected


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("TrainingArguments(x=1)", False),
        ("TrainingArguments(**parsed)", True),
        ("TrainingArguments(**{'x': 1})", False),
        ("a = TrainingArguments(x=1)\nhelper(a)", True),
        ("a = TrainingArguments(x=1)\nhelper(args=a)", True),
        ("a = TrainingArguments(x=1)\nprint(a)\nlogger.info(a)\nTrainer(args=a)", False),
        ("def show(a):\n    print(a.x)\na = TrainingArguments(x=1)\nshow(a)", False),
    ],
)
def test_what_is_not_followed_may_set_any_field(text: str, is_open: bool) -> None:
    (only,) = built(text)
    assert only.is_open is is_open


def test_each_object_knows_its_place_and_its_name() -> None:
    text = "class Mine(trl.TrainingArguments): pass\nx = Mine('out', lr=1)\ny = TrainingArguments(\n  lr=2)\n"
    mine, plain = built(text)
    assert (mine.kind, mine.name, mine.positional) == ("TrainingArguments", "Mine", ("out",))
    assert [str(place) for *_, place in [*mine.values(), *plain.values()]] == [
        "train.py:2:17",
        "train.py:4:3",
    ]
    assert str(plain.place) == "train.py:3:5"


@pytest.mark.parametrize("text", ["x = (", "x = '\\0" + "9" * 5000, "x = 1\n\ty", "x = " + "(" * 400])
def test_what_is_no_python_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UnusableInput, match=r"train\.py:1.* is not valid Python|train\.py:2") as caught:
        built(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "1+" * 3000 + "1\nTrainingArguments(x=x)",
        "x = " + "a." * 3000 + "a\nTrainingArguments(x=x)",
        "a.update(" * 60 + "TrainingArguments(x=1)" + ")" * 60,
        "def f():\n    f()\n    f()\nf()\nTrainingArguments(x=1)",
        "x = [1]\n" + "x = x + x\n" * 200 + "TrainingArguments(x=x)",
        "x = {}\nx['x'] = x\nTrainingArguments(x=x)",
        "class A(A): pass\nTrainingArguments(x=A())",
    ],
)
def test_what_has_no_end_ends(text: str) -> None:
    try:
        found, refusal = built(text), ""
    except UnusableInput as error:
        found, refusal = [], str(error)
    assert len(found) == 1 or "\n" not in refusal
