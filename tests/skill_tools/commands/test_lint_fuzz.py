"""Damaged input of every form ends with exit code 0, 1 or 2 and never with a traceback."""

import contextlib
import io
import random
import sys
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skill_tools.__main__ import main
from skill_tools.rules.knowledge import load_rules

EXAMPLES = [
    (example.filename, text)
    for rule in load_rules()
    for example in rule.examples.values()
    for text in (example.bad, example.good)
    if example.filename != "<overrides>"
]
SPLICES = [
    "\n", "\t", "  ", "{", "}", "[", "]", ":", "- ", "&a ", "*a", "<<: *a\n", "!!python/object:os.system x", "'", '"',
    "|", "#", "\\", "$(", "${x:-", "`", "null", "~", "1e999", "0x", "-1", "9" * 400, "\0", "\ufeff", "\u2028", "é", "=",
    "--", "-", "def f(", "*" * 50, "---\n", "...\n", "? ", "!!binary |", "\r\n", ".inf", "${oc.env:X}", "%", "true",
]  # fmt: skip


def damaged(text: str, seed: int) -> str:
    """`text` with a few pieces cut, doubled, swapped or spliced in."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 6)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.randint(0, 30))
        piece = chance.choice(
            ["", text[start:end] * 2, chance.choice(SPLICES), chance.choice(SPLICES) + text[start:end]]
        )
        text = text[:start] + piece + text[end:]
    return text


def lint_text(filename: str, data: bytes, *more: str) -> tuple[int, str]:
    """Lint `data` as standard input; the exit code and what went to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "stdin") as stdin,
    ):
        stdin.buffer = io.BytesIO(data)
        code = main(["lint", "--stdin", "--stdin-filename", filename, *more])
    return code, err.getvalue()


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(EXAMPLES), st.integers(0, 2**32), st.sampled_from(["concise", "json", "sarif"]))
def test_damaged_examples(example: tuple[str, str], seed: int, form: str) -> None:
    filename, text = example
    code, err = lint_text(filename, damaged(text, seed).encode("utf-8", "surrogatepass"), "--format", form)
    assert code in (0, 1, 2), err


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from(["x.yaml", "x.sh", "x.py", "x.json", "x"]))
def test_binary_junk(data: bytes, filename: str) -> None:
    for framework in ("megatron-bridge", "megatron-lm", "axolotl"):
        code, err = lint_text(filename, data, "--framework", framework)
        assert code in (0, 1, 2), err


@settings(max_examples=100)
@given(st.sampled_from(EXAMPLES), st.integers(0, 2**32))
def test_damaged_examples_can_be_diffed(example: tuple[str, str], seed: int) -> None:
    filename, text = example
    code, err = lint_text(
        filename, damaged(text, seed).encode("utf-8", "surrogatepass"), "--diff", "--unsafe-fixes"
    )
    assert code in (0, 1, 2), err


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
LARGE = {
    "an alias bomb": BOMB,
    "deep flow nesting": "model: " + "[" * 50_000,
    "deep block nesting": "".join(f"{' ' * n}a:\n" for n in range(2_000)),
    "one long line": "model: {a: " + "x" * 10_000_000 + "}",
    "ten megabytes of keys": "".join(f"key{n}: {n}\n" for n in range(700_000)),
    "a long list": "model: [" + "1, " * 200_000 + "1]",
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("filename", ["x.yaml", "x.sh", "x.py", "x.json"])
def test_large_input_is_refused_or_read_but_never_fatal(filename: str, text: str) -> None:
    code, err = lint_text(filename, text.encode(), "--framework", "megatron-bridge")
    assert code in (0, 1, 2), err
    assert len(err.splitlines()) <= 1
