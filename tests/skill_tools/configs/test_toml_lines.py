# SPDX-License-Identifier: Apache-2.0
"""TOML: tomllib's values, each at the line and column of its key or element."""

import random
import string
import tomllib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.source import Kind, Source
from skill_tools.configs.toml_lines import parse
from skill_tools.configs.yaml_lines import Node, plain
from skill_tools.errors import UnusableInput

TEXT = '''\
# a comment with [brackets] and "quotes"
title = "x # no comment"   # one
[training]
steps = 10_000
  enable_cpu_offload = true
"quoted key" = 'single'
a.b."c.d" = 1
text = """
[not.a.table]
key = 1
"""
literal = \'\'\'
""" [[still]] text
\'\'\'
list = [
  1, # first
  [2, 3],
  {x = 1, y.z = "}"},
]

[optimizer.nested]
lr = 1e-4
when = 2024-01-02T03:04:05Z
[[fruits]]
name = "apple"
[fruits.physical]
color = "red"
[[fruits.varieties]]
name = "red delicious"
[[fruits]]
name = "banana"
[[fruits.varieties]]
name = "plantain"
'''


def at(node: Node, *path: str | int) -> Node:
    for part in path:
        node = node.value[part]  # type: ignore[index]
    return node


@pytest.mark.parametrize(
    ("path", "line", "column"),
    [
        (("title",), 2, 1),
        (("training",), 3, 1),
        (("training", "steps"), 4, 1),
        (("training", "enable_cpu_offload"), 5, 3),
        (("training", "quoted key"), 6, 1),
        (("training", "a"), 7, 1),
        (("training", "a", "b", "c.d"), 7, 1),
        (("training", "text"), 8, 1),
        (("training", "literal"), 12, 1),
        (("training", "list"), 15, 1),
        (("training", "list", 0), 16, 3),
        (("training", "list", 1, 1), 17, 7),
        (("training", "list", 2, "x"), 18, 4),
        (("training", "list", 2, "y", "z"), 18, 11),
        (("optimizer",), 21, 1),
        (("optimizer", "nested", "lr"), 22, 1),
        (("fruits", 0, "name"), 25, 1),
        (("fruits", 0, "physical", "color"), 27, 1),
        (("fruits", 0, "varieties", 0, "name"), 29, 1),
        (("fruits", 1), 30, 1),
        (("fruits", 1, "name"), 31, 1),
        (("fruits", 1, "varieties", 0, "name"), 33, 1),
    ],
)
def test_each_value_stands_where_its_key_does(path: tuple[str | int, ...], line: int, column: int) -> None:
    (root,) = parse(TEXT, "x.toml")
    found = at(root, *path)
    assert (found.line, found.column) == (line, column)


def test_values_are_those_of_the_standard_library() -> None:
    (root,) = parse(TEXT, "x.toml")
    expected = tomllib.loads(TEXT)
    expected["optimizer"]["nested"]["when"] = "2024-01-02T03:04:05+00:00"
    assert plain(root) == expected


def test_windows_line_ends_count_as_one() -> None:
    (root,) = parse(TEXT.replace("\n", "\r\n"), "x.toml")
    assert at(root, "fruits", 1, "varieties", 0, "name").line == 33


KEYS = st.text(string.ascii_letters + " \".#[]='", min_size=1, max_size=4)
VALUES = st.recursive(
    st.integers(-9, 9) | st.booleans() | st.text(string.printable, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 else c for c in escaped) + '"'


def written(value: object, random_: random.Random) -> str:
    """One value, in one of the ways of TOML."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case str():
            plain_text = "'" not in value and value.isprintable()
            return f"'{value}'" if plain_text and random_.random() < 0.5 else quoted(value)
        case list():
            gap = random_.choice(["", " ", "\n  ", " # ]\n"])
            return f"[{gap}" + f",{gap}".join(written(each, random_) for each in value) + f"{gap}]"
    assert isinstance(value, dict)
    pairs = (f"{quoted(key)} = {written(each, random_)}" for key, each in value.items())
    return "{" + ", ".join(pairs) + "}"


def leaves(node: Node) -> Iterator[Node]:
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if isinstance(node.value, dict | list):
        for child in children:  # type: ignore[union-attr]
            yield from leaves(child)
    else:
        yield node


@given(st.lists(st.tuples(KEYS, VALUES), max_size=5, unique_by=lambda pair: pair[0]), st.integers())
def test_any_document_keeps_values_and_places(pairs: list[tuple[str, object]], seed: int) -> None:
    random_ = random.Random(seed)
    lines = [f"{quoted(key)} = {written(value, random_)}" for key, value in pairs]
    text = "\n".join(lines)
    (root,) = parse(text, "x.toml")
    assert plain(root) == tomllib.loads(text)
    number = 1
    for (key, _), line in zip(pairs, lines, strict=True):
        assert (at(root, key).line, at(root, key).column) == (number, 1)
        assert all(number <= leaf.line <= number + line.count("\n") for leaf in leaves(at(root, key)))
        number += 1 + line.count("\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = ", "not valid TOML"),
        ("[a\nb = 1", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        (f"a = {'9' * 5000}", "not valid TOML"),
        (f"a = {'[' * 5000}", "nested deeper than 64"),
        (f"{'a.' * 5000}a = 1", "nested deeper than 64"),
        (f"a = [{'1,' * 120_000}]", "more than 100000 values"),
        ("a = {b = 1", "not valid TOML"),
        ('"\\q" = 1', "not valid TOML"),
    ],
)
def test_what_is_no_toml_ends_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UnusableInput, match=words) as error:
        parse(text, "x.toml")
    assert "x.toml" in str(error.value)


@given(st.text(string.printable + "[]=.\"'{}#\n", max_size=60))
def test_any_text_is_toml_or_refused(text: str) -> None:
    try:
        (root,) = parse(text, "x.toml")
    except UnusableInput:
        with pytest.raises((ValueError, RecursionError)):
            tomllib.loads(text)
    else:
        assert isinstance(root.value, dict)


def test_a_file_and_a_text_that_begins_with_a_section_are_toml() -> None:
    assert Source("x.toml", "a = 1").kind is Kind.TOML
    assert Source("-", "# run\n[job]\ndump_folder = 'x'\n").kind is Kind.TOML
    assert Source("-", "[a, b]\n").kind is Kind.YAML
    (root,) = Source("x.toml", "[a]\nb = 1").documents
    assert at(root, "a", "b").line == 2
