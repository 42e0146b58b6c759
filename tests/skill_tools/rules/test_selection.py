# SPDX-License-Identifier: Apache-2.0
from types import MappingProxyType

import pytest
from for_each import for_each

from skill_tools.errors import UnusableInput
from skill_tools.rules.selection import Selection, checked

FILE = Selection(select=("ds", "la-pp"), ignore=("ds-zenflow",))
# A file's selection, the command line's, a rule, and whether it counts.
CASES = [
    (Selection(), Selection(), "la-pp", True),
    (FILE, Selection(), "la-pp", True),
    (FILE, Selection(), "la-pp-other", True),
    (FILE, Selection(), "la-mtp", False),
    (FILE, Selection(), "ds-ratio", True),
    (FILE, Selection(), "ds-zenflow-sum", False),
    (FILE, Selection(), "dsx-other", False),
    (Selection(select=("ds-zenflow-sum",), ignore=("ds-zenflow",)), Selection(), "ds-zenflow-sum", True),
    (Selection(select=("ds",), ignore=("ALL",)), Selection(), "ds-ratio", True),
    (FILE, Selection(ignore=("ds-ratio",)), "ds-ratio", False),
    (FILE, Selection(ignore=("ds-ratio",)), "ds-zenflow-sum", False),
    (FILE, Selection(select=("ds-zenflow",)), "ds-zenflow-sum", True),
    (FILE, Selection(select=("ds-zenflow",)), "ds-ratio", False),
    (FILE, Selection(select=("ALL",)), "la-mtp", True),
    (Selection(select=()), Selection(), "la-pp", False),
]


@for_each(CASES, lambda case: case)
def test_the_command_line_wins_and_the_longer_selector_decides(
    case: tuple[Selection, Selection, str, bool],
) -> None:
    of_file, of_call, rule, counts = case
    assert of_file.below(of_call).counts(rule, "run.yaml") is counts


@pytest.mark.parametrize(
    ("pattern", "file", "counts"),
    [
        ("*.yaml", "/p/a/run.yaml", False),
        ("a/*.yaml", "/p/a/run.yaml", False),
        ("a/**", "/p/a/b/run.yaml", False),
        ("run.yaml", "/p/a/run.yaml", False),
        ("b/*.yaml", "/p/a/run.yaml", True),
        ("!a/*", "/p/a/run.yaml", True),
        ("!a/*", "/p/b/run.yaml", False),
    ],
)
def test_patterns_of_files_are_relative_to_the_settings(pattern: str, file: str, counts: bool) -> None:
    selection = Selection(per_file=MappingProxyType({pattern: ("la",)}), folder="/p")
    assert selection.counts("la-pp", file) is counts
    assert selection.below(Selection(select=("la",))).counts("la-pp", file) is counts
    assert selection.counts("oc-lora", file)


def test_a_name_that_no_rule_has_is_an_error() -> None:
    known = ["la-pp", "ds-zenflow-sum", "ds-ratio"]
    assert checked(["la", "ds-zenflow", "la-pp", "ALL"], known, "x") == ("la", "ds-zenflow", "la-pp", "ALL")
    for wrong in ("l", "ds-zen", "la-pq", "", "all"):
        with pytest.raises(UnusableInput, match="x: there is no rule"):
            checked([wrong], known, "x")
