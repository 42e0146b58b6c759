# SPDX-License-Identifier: Apache-2.0
"""Dotted overrides: everything that Hydra's grammar allows comes back as the value it stands for."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.hydra import Override, looks_like_override, parse_override
from skill_tools.configs.values import UNREADABLE
from skill_tools.errors import UnusableInput

segments = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
keys = st.lists(segments, min_size=1, max_size=4).map(".".join)
signs = st.sampled_from(["", "+", "++"])
words = st.from_regex(r"[a-z][a-z0-9_./-]{0,9}", fullmatch=True).filter(
    lambda word: word not in ("null", "true", "false", "inf", "nan")
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), words)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=10,
)


def written(value: object) -> str:
    """Write a value the way a user would on the command line."""
    if isinstance(value, list):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


@given(signs, keys, values)
def test_a_written_value_is_read_back(sign: str, key: str, value: object) -> None:
    assert parse_override(f"{sign}{key}={written(value)}") == Override(sign, key, value)


@given(keys, st.text(max_size=20), st.sampled_from("'\""))
def test_quoted_text_is_kept_as_it_is(key: str, text: str, quote: str) -> None:
    # A backslash is one of its own, but in front of a quote.
    body = re.sub(rf"(\\*)({quote}|$)", lambda at: at[1] * 2 + (f"\\{quote}" if at[2] else ""), text)
    expected = UNREADABLE if "${" in text else text
    assert parse_override(f"{key}={quote}{body}{quote}").value == expected


@given(st.text(max_size=40))
def test_any_text_is_an_override_or_refused_in_one_line(text: str) -> None:
    try:
        override, refusal = parse_override(text), ""
    except UnusableInput as error:
        override, refusal = None, str(error)
    assert override is None or (looks_like_override(text) and override.key)
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("text", "sign", "value"),
    [
        ("a.b=TRUE", "", True),
        ("a.b=Null", "", None),
        ("a.b=", "", ""),
        ("a.b=1e-4", "", 1e-4),
        ("a.b=1_000", "", 1000),
        ("a.b=x y", "", "x y"),
        ("a.b=[ a , b ]", "", ["a", "b"]),
        ("+a.b=torch.float32", "+", "torch.float32"),
        ("++a.b={}", "++", {}),
        ("~a.b", "~", None),
        ("~a.b=3", "~", 3),
        ("a.b=/data/x:y", "", "/data/x:y"),
        ("a.b=\\,", "", ","),
        ("a.b=x\\=y", "", "x=y"),
        ("a.b=.5_", "", ".5_"),
        ("a.b=C:\\x", "", "C:\\x"),
    ],
)
def test_forms(text: str, sign: str, value: object) -> None:
    assert parse_override(text) == Override(sign, "a.b", value)


@pytest.mark.parametrize(
    "text", ["a=${oc.env:HOME}", "a=[1,${x}]", "a={k: ${x.y}}", "a='${x}'", "a=pre${x}post"]
)
def test_interpolations_are_not_readable(text: str) -> None:
    assert parse_override(text).value is UNREADABLE


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=1",
        "a=[1",
        "a=b]",
        "a=1,2",
        "a=choice(1,2)",
        "a='open",
        "a={k}",
        "a=[1 2,]]",
        "a=" + "[" * 100,
        "a=b=c",
        "a=é",
        "a=x'y",
    ],
)
def test_what_hydra_refuses_is_refused(text: str) -> None:
    with pytest.raises(UnusableInput, match="is not valid; expected"):
        parse_override(text)
