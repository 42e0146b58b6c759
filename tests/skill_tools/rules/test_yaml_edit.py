# SPDX-License-Identifier: Apache-2.0
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.rules import yaml_edit

JSON = '{\n  "a": {\n    "b": false\n  }\n}\n'
TEXT = """\
# top
model:
  a: true   # keep
  mods: # why
    - x
    - y
  # after mods
  q: 'old'  # quoted
optimizer: {b: 1, c: "z"}
only:
  sub:
    k: 1
note: |
  two
  lines
# a comment between
empty:
"""


def pair(line: int, name: str) -> yaml_edit.Pair:
    found = yaml_edit.find_pair(TEXT, line=line, name=name)
    assert found is not None
    return found


def test_a_scalar_keeps_its_comment_and_its_quotes() -> None:
    assert yaml_edit.set_value(TEXT, pair(3, "model.a"), False) == TEXT.replace("a: true ", "a: false ")
    assert yaml_edit.set_value(TEXT, pair(8, "model.q"), "new") == TEXT.replace("'old'", "'new'")


def test_a_block_becomes_one_line_and_keeps_the_comment_of_its_key() -> None:
    expected = TEXT.replace("mods: # why\n    - x\n    - y\n", "mods: [z] # why\n")
    assert yaml_edit.set_value(TEXT, pair(4, "mods"), ["z"]) == expected
    assert yaml_edit.set_value(TEXT, pair(13, "note"), "short") == TEXT.replace(
        "|\n  two\n  lines\n", "short\n"
    )


def test_an_empty_value_is_filled() -> None:
    assert yaml_edit.set_value(TEXT, pair(17, "empty"), 3) == TEXT.replace("empty:", "empty: 3")


def test_a_key_is_added_beside_another_in_block_and_in_flow_style() -> None:
    assert yaml_edit.add_sibling(TEXT, pair(4, "mods"), "new", 1.0) == TEXT.replace(
        "- y\n", "- y\n  new: 1.0\n"
    )
    added = yaml_edit.add_sibling(TEXT, pair(9, "optimizer.b"), "new", None)
    assert added == TEXT.replace("b: 1,", "b: 1, new: null,")


def test_a_section_is_added_at_the_end() -> None:
    assert yaml_edit.add_at_end(TEXT, ("ddp", "x"), True) == f"{TEXT}ddp:\n  x: true\n"
    assert yaml_edit.add_at_end("# nothing yet\n", ("ddp", "x"), True) == "# nothing yet\nddp:\n  x: true\n"


def test_an_existing_section_is_not_added_again() -> None:
    assert yaml_edit.add_at_end(TEXT, ("model", "x"), True) is None


def test_a_key_is_removed_with_its_block_and_the_sections_it_leaves_empty() -> None:
    assert yaml_edit.remove(TEXT, pair(4, "mods")) == TEXT.replace("  mods: # why\n    - x\n    - y\n", "")
    assert yaml_edit.remove(TEXT, pair(12, "k")) == TEXT.replace("only:\n  sub:\n    k: 1\n", "")
    assert yaml_edit.remove(TEXT, pair(9, "optimizer.c")) == TEXT.replace(', c: "z"', "")
    assert yaml_edit.remove(TEXT, pair(9, "optimizer.b")) == TEXT.replace("b: 1, ", "")


def test_an_edit_that_would_reach_further_is_refused() -> None:
    for sharing in ("one:\n  <<: *b\n", "two: *b\n"):
        shared = f"base: &b\n  x: 1\n  y: 2\n{sharing}"
        found = yaml_edit.find_pair(shared, line=2, name="x")
        assert found is not None
        assert yaml_edit.set_value(shared, found, 2) is None
        assert yaml_edit.remove(shared, found) is None


def test_the_files_line_ends_are_kept() -> None:
    windows = TEXT.replace("\n", "\r\n")
    found = yaml_edit.find_pair(windows, line=4, name="mods")
    assert found is not None
    added = yaml_edit.add_sibling(windows, found, "new", 1.0)
    assert added == TEXT.replace("- y\n", "- y\n  new: 1.0\n").replace("\n", "\r\n")
    removed = yaml_edit.remove(windows, found)
    assert removed == TEXT.replace("  mods: # why\n    - x\n    - y\n", "").replace("\n", "\r\n")
    odd = "a: 1\u2028b: 2\n"
    second = yaml_edit.find_pair(odd, line=2, name="b")
    assert second is not None
    assert yaml_edit.set_value(odd, second, 3) == "a: 1\u2028b: 3\n"


def test_a_section_that_holds_no_mapping_is_left_alone() -> None:
    assert yaml_edit.add_at_end("section:\n", ("section", "key"), 1) is None
    assert yaml_edit.add_at_end("section: text\n", ("section", "sub", "key"), 1) is None


def test_a_key_that_is_no_text_is_left_alone() -> None:
    found = yaml_edit.find_pair("1: a\nb: c\n", line=1, name="1")
    assert found is not None
    assert yaml_edit.remove("1: a\nb: c\n", found) is None


def test_text_that_is_not_yaml_has_no_pairs() -> None:
    assert list(yaml_edit.pairs("a: [")) == []
    assert list(yaml_edit.pairs("")) == []


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text("abc: #'\"-", max_size=6))
KEYS = st.text("abcd_", min_size=1, max_size=4)
MAPPINGS = st.recursive(
    st.dictionaries(KEYS, SCALARS, min_size=1, max_size=3),
    lambda inner: st.dictionaries(
        KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=2), inner), min_size=1, max_size=3
    ),
    max_leaves=6,
)


def at(data: Any, path: tuple[object, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


@given(MAPPINGS, SCALARS, st.booleans(), st.data())
def test_setting_changes_the_one_value_and_nothing_else(
    data: dict[str, Any], value: object, flow: bool, draw: st.DataObject
) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, sort_keys=False)
    chosen = draw.draw(st.sampled_from(list(yaml_edit.pairs(text))))
    edited = yaml_edit.set_value(text, chosen, value)
    assert edited is not None
    expected = copy.deepcopy(data)
    at(expected, chosen.path[:-1])[chosen.path[-1]] = value
    assert yaml.safe_load(edited) == expected


@given(MAPPINGS, st.booleans(), st.data())
def test_removing_takes_the_one_key_and_nothing_else(
    data: dict[str, Any], flow: bool, draw: st.DataObject
) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, sort_keys=False)
    chosen = draw.draw(st.sampled_from(list(yaml_edit.pairs(text))))
    edited = yaml_edit.remove(text, chosen)
    if edited is not None:
        left = {pair.path for pair in yaml_edit.pairs(edited)}
        assert chosen.path not in left
        before = {pair.path for pair in yaml_edit.pairs(text)}
        ancestors = {chosen.path[:depth] for depth in range(1, len(chosen.path))}
        below = {path for path in before if path[: len(chosen.path)] == chosen.path}
        assert before - left <= below | ancestors


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (lambda pair: yaml_edit.set_value(JSON, pair, "cpu"), '{\n  "a": {\n    "b": "cpu"\n  }\n}\n'),
        (lambda pair: yaml_edit.add_sibling(JSON, pair, "c", "x"),
         '{\n  "a": {\n    "b": false,\n    "c": "x"\n  }\n}\n'),
        (lambda pair: yaml_edit.remove(JSON, pair), None),
    ],
)  # fmt: skip
def test_json_stays_json(edit: Callable[[yaml_edit.Pair], str | None], after: str | None) -> None:
    pair = yaml_edit.find_pair(JSON, line=3, name="a.b")
    assert pair is not None
    edited = edit(pair)
    assert edited is not None
    json.loads(edited)
    assert after is None or edited == after
