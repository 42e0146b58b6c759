# SPDX-License-Identifier: Apache-2.0
"""Damaged input of every form ends with exit code 0, 1 or 2 and never with a traceback."""

from collections.abc import Callable

import damage_answers
import pytest
from damage import campaign, examples, lint_damaged, lint_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = [(suffix, text) for suffix, texts in sorted(examples().items()) for text in texts]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(EXAMPLES), st.integers(0, 2**32))
def test_damaged_examples(example: tuple[str, tuple[str, str]], seed: int) -> None:
    code, err = lint_damaged(*example, seed)
    assert code in (0, 1, 2), err


def test_damaged_examples_are_only_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign(12, seed=7) == 0, capsys.readouterr().out


def test_damaged_questions_are_answered_and_only_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert damage_answers.campaign(8, seed=7) == 0, capsys.readouterr().out


@settings(max_examples=100)
@given(st.binary(max_size=300), st.sampled_from(["x.yaml", "x.sh", "x.py", "x.json", "x"]))
def test_binary_junk(data: bytes, filename: str) -> None:
    for framework in ("megatron-bridge", "megatron-lm", "axolotl"):
        code, err = lint_text(filename, data, "--framework", framework)
        assert code in (0, 1, 2), err


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
LARGE: dict[str, Callable[[], str]] = {
    "an alias bomb": lambda: BOMB,
    "deep flow nesting": lambda: "model: " + "[" * 50_000,
    "deep block nesting": lambda: "".join(f"{' ' * n}a:\n" for n in range(2_000)),
    "one long line": lambda: "model: {a: " + "x" * 10_000_000 + "}",
    "ten megabytes of keys": lambda: "".join(f"key{n}: {n}\n" for n in range(700_000)),
    "a long list": lambda: "model: [" + "1, " * 200_000 + "1]",
}


@pytest.mark.parametrize("made", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize(
    "filename",
    ["x.yaml", *(pytest.param(name, marks=pytest.mark.slow) for name in ("x.sh", "x.py", "x.json"))],
)
def test_large_input_is_refused_or_read_but_never_fatal(filename: str, made: Callable[[], str]) -> None:
    code, err = lint_text(filename, made().encode(), "--framework", "megatron-bridge")
    assert code in (0, 1, 2), err
    assert len(err.splitlines()) <= 1
