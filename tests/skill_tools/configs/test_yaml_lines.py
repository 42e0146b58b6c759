# SPDX-License-Identifier: Apache-2.0
"""The composer agrees with PyYAML on values and places, and refuses endless texts."""

from collections.abc import Iterator

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_events import parse
from skill_tools.configs.yaml_lines import (
    IN_PYTHON,
    MAX_DEPTH,
    OMEGACONF,
    ON_LIBYAML,
    Loader,
    Node,
    as_omegaconf,
    plain,
)
from skill_tools.errors import UnusableInput

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12),
)
names = st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: yaml.safe_load(name) == name)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(names, trees, min_size=1, max_size=5)


def only(text: str, *, omegaconf: bool = False) -> Node:
    (root,) = parse(text, "config.yaml")
    return as_omegaconf(root) if omegaconf else root


def value_of(text: str, *, omegaconf: bool = False) -> object:
    return plain(only(text, omegaconf=omegaconf))


def marks_of_composer(node: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Every key with the place that PyYAML's own composer gives it."""
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield key.value, key.start_mark.line + 1, key.start_mark.column + 1
            yield from marks_of_composer(child)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from marks_of_composer(child)


def marks_of(node: Node) -> Iterator[tuple[str, int, int]]:
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield key, child.line, child.column
            yield from marks_of(child)
    elif isinstance(node.value, list):
        for child in node.value:
            yield from marks_of(child)


@given(documents, st.booleans(), st.integers(1, 4))
def test_values_and_places_are_those_of_pyyaml(document: dict[str, object], flow: bool, indent: int) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow, indent=indent + 1, allow_unicode=True)
    root = only(text)
    assert plain(root) == yaml.safe_load(text)
    assert list(marks_of(root)) == list(marks_of_composer(yaml.compose(text)))


@pytest.mark.parametrize(
    "text",
    ["yes", "No", "0777", "0x1F", "1_000", "12:30:45", ".inf", "1e-4", "1.0e-4", "~", "", "null", "0b11"],
)
def test_scalars_are_those_of_yaml_1_1(text: str) -> None:
    assert value_of(f"key: {text}") == yaml.safe_load(f"key: {text}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        ("1.0e5", 1e5),
        (".5", 0.5),
        ("1_0.5", 10.5),
        ("10", 10),
        ("1.2.3", "1.2.3"),
    ],
)
def test_omegaconf_reads_more_text_as_numbers(text: str, value: object) -> None:
    assert value_of(f"key: {text}", omegaconf=True) == {"key": value}


def test_quoted_numbers_and_dates_stay_text() -> None:
    assert value_of("a: '4'\nb: 2024-01-02\nc: \"1e-4\"", omegaconf=True) == {
        "a": "4",
        "b": "2024-01-02",
        "c": "1e-4",
    }


@pytest.mark.parametrize(
    "value",
    [
        "!!int x", "!!float b", "0x_", "!!bool maybe", "=", "<<", "!mine 1", "!!map [a]", "[<<]",
        "{[a]: 1}", "{{a: 1}: 1}",
        "{<<: 1}", "{<<: [1]}", "[&a 1, &a 2]", "!!timestamp soon",
    ],
)  # fmt: skip
def test_what_no_loader_makes_a_value_of_is_refused(value: str) -> None:
    with pytest.raises(UnusableInput, match="is not valid YAML"):
        only(f"key: {value}")
    with pytest.raises((yaml.YAMLError, ValueError, AttributeError, KeyError)):
        yaml.safe_load(f"key: {value}")


@pytest.mark.parametrize(
    ("text", "refusing"),
    [
        ("lr: 1\t# comment", IN_PYTHON),
        ('lr: "\\ud83d\\ude00"', ON_LIBYAML),
        ("lr: 1\nlr: 2", OMEGACONF),
        ("day: 2026-02-30", {Loader.SAFE, Loader.FULL}),
        ("lr: !!python/tuple [1]", set(Loader) - {Loader.FULL}),
        ("lr: 1", set()),
    ],
)
def test_a_text_that_some_loaders_refuse_is_read_and_says_who_does(text: str, refusing: set[Loader]) -> None:
    documents = parse(text, "a.yaml")
    assert plain(documents[0])
    assert {loader for refusal in documents.refusals for loader in refusal.loaders} == refusing


def test_half_a_surrogate_pair_is_a_value_of_the_loader_in_python() -> None:
    text = 'key: "\\ud83d\\ude00"'
    assert value_of(text) == yaml.safe_load(text)


def test_merge_keys_yield_to_written_ones_and_keep_their_own_place() -> None:
    text = "base: &b {lr: 1, wd: 2}\nrun:\n  lr: 3\n  <<: *b\n"
    root = only(text)
    assert plain(root) == {"base": {"lr": 1, "wd": 2}, "run": {"lr": 3, "wd": 2}} == yaml.safe_load(text)
    run = root.value["run"].value  # type: ignore[index]
    assert (run["lr"].line, run["wd"].line) == (3, 1)


BASES = "one: &one {lr: 1, wd: 2}\ntwo: &two {lr: 7, wd: 2}\n"


def test_of_several_merge_keys_the_later_wins() -> None:
    text = f"{BASES}run:\n  <<: *one\n  <<: *two\n"
    assert value_of(text) == yaml.safe_load(text)


def test_who_wins_in_the_list_of_a_merge_key_depends_on_the_release_of_pyyaml() -> None:
    text = f"{BASES}run: {{<<: [*one, *two]}}\n"
    (before,), (since,), unknown = (
        parse(text, "a.yaml", last_merge_wins=each) for each in (False, True, None)
    )
    assert (plain(before)["run"], plain(since)["run"]) == ({"lr": 1, "wd": 2}, {"lr": 7, "wd": 2})  # type: ignore[index]
    assert plain(unknown[0])["run"] == {"lr": UNREADABLE, "wd": 2}  # type: ignore[index]
    assert [doubt.text for doubt in unknown.doubts] == ["lr is 1 in PyYAML before 6.0.4 and 7 since"]
    assert yaml.safe_load(text)["run"]["lr"] == (1 if yaml.__version__ < "6.0.4" else 7)


def test_keys_that_are_one_value_are_one_key() -> None:
    assert list(only("{yes: a, true: b}").value) == ["yes"]  # type: ignore[call-overload]
    assert value_of("{yes: a, true: b}") == {"yes": "b"}


def test_the_last_of_duplicate_keys_wins_and_the_others_are_remembered() -> None:
    root = only("lr: 1\nlr: 2\nlr: 3\n")
    node = root.value["lr"]  # type: ignore[index]
    assert (node.value, node.line) == (3, 3)
    assert [(loser.value, loser.line) for loser in node.shadowed] == [(1, 1), (2, 2)]


def test_several_documents_are_told_apart() -> None:
    assert [plain(root) for root in parse("a: 1\n---\nb: 2\n", "two.yaml")] == [{"a": 1}, {"b": 2}]
    assert parse("# nothing\n", "empty.yaml") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,\nb: 2", "bad.yaml:3:1 is not valid YAML"),
        ("a: 'open", "not valid YAML"),
        ("a: *nowhere", "bad.yaml:1: the alias *nowhere is not defined"),
        ("a: &a [*a]", "the alias *a refers to itself"),
        ("a: " + "[" * 500, f"nested deeper than {MAX_DEPTH} levels"),
        ("b0: &b0 1\n" + "".join(f"b{n}: &b{n} [*b{n - 1}]\n" for n in range(1, 200)), "nested deeper"),
        pytest.param("- 1\n" * 100_001, "more than 100000 values", marks=pytest.mark.slow),
        ("a: \x01", "not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UnusableInput, match="expected") as caught:
        parse(text, "bad.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["{}: &{} [{}]", "{}: &{} {{{}}}", "{}: &{}\n  <<: [{}]"])
def test_an_alias_bomb_is_refused_before_it_is_unrolled(form: str) -> None:
    bomb = "n0: &n0 {k: 1}\n"
    for level in range(1, 30):
        uses = [f"k{use}: *n{level - 1}" if "{{" in form else f"*n{level - 1}" for use in range(9)]
        bomb += form.format(f"n{level}", f"n{level}", ", ".join(uses)) + "\n"
    with pytest.raises(UnusableInput, match="more than 100000 values"):
        parse(bomb, "bomb.yaml")


def test_aliases_within_bounds_are_expanded() -> None:
    assert value_of("a: &x [1, 2]\nb: *x\nc: [*x, *x]\n") == {"a": [1, 2], "b": [1, 2], "c": [[1, 2], [1, 2]]}
