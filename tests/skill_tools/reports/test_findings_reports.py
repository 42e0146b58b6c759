# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

import jsonschema
import pytest
from schemas import assert_follows

from skill_tools.bundle import schema_path
from skill_tools.configs.config import Place
from skill_tools.errors import UnusableInput, printable
from skill_tools.reports.ci_findings import as_github, as_gitlab, as_junit, as_sarif
from skill_tools.reports.findings import ReadAs, Report, as_concise, as_json, error_as_json, report
from skill_tools.rules.finding import Evidence, Finding, Fix, LintResult, Severity, Undecided

SCHEMA = json.loads(schema_path("findings").read_text(encoding="utf-8"))


def finding(
    rule: str = "la-pp", line: int = 3, severity: Severity = Severity.ERROR, **more: object
) -> Finding:
    fields: dict[str, object] = {
        "title": "PP must be 1",
        "message": "does not work: model.a=true (line 3), 100% sure",
        "place": Place("dir/run.yaml", line, 5),
        "observed": {"a": True, "n": None, "mods": ["x"]},
        "why": "Because.",
        "evidence": Evidence("msg", "a.py::f", "no"),
        "next": "Set it to 1.",
        "fix": Fix("manual", "Choose.", ("one", "two")),
        "docs": "offload explain la-pp",
    }
    return Finding(rule=rule, severity=severity, **(fields | more))  # type: ignore[arg-type]


@pytest.fixture
def full() -> Report:
    verdict = LintResult(
        (
            finding(),
            finding("oc-x", 9, Severity.WARNING, depends_on=("megatron-core>=0.18",)),
            finding("fg-i", 1, Severity.INFO),
        ),
        (Undecided("fg-y", "Something open", ("num_layers", "fp8")), Undecided("fg-z", "More", ("fp8",))),
        9,
    )
    error = UnusableInput("cannot read 'x'", expected="a file", attempt="another")
    return report([("dir/run.yaml", verdict)], [error])


def check(document: Mapping[str, object]) -> None:
    assert_follows(document, "findings")


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_concise_is_one_line_a_finding_and_a_summary(full: Report) -> None:
    first, second, third, last = as_concise(full).split("\n")
    assert first == (
        "dir/run.yaml:3:5 error la-pp does not work: model.a=true (line 3), 100% sure → Set it to 1."
    )
    assert "[depends on megatron-core>=0.18]" in second
    assert third.startswith("dir/run.yaml:1:5 info fg-i")
    assert last == (
        "1 error, 1 warning, 1 info in 1 input; 9 rules asked; 2 undecided (--show-undecided); "
        "megatron-core is not stated: oc-x depends on it; 1 input not usable"
    )


def test_open_rules_are_listed_on_request(full: Report) -> None:
    assert "dir/run.yaml undecided fg-z More → state fp8" in as_concise(full, show_undecided=True).split("\n")


def test_a_clean_call_says_so() -> None:
    assert (
        as_concise(report([("a", LintResult((), (), 5)), ("b", LintResult((), (), 4))], []))
        == "no findings in 2 inputs; 9 rules asked"
    )


def test_the_last_line_says_how_far_it_goes() -> None:
    """The releases known to the rules, and the rules that depend on an unstated one, by name."""
    open_ = Undecided("ax-y", "Something open", ("axolotl<0.18", "adapter"))
    verdict = LintResult(
        (finding("ax-z", 1, Severity.INFO, depends_on=("axolotl>=0.20", "torch<2.9")),), (open_,), 7
    )
    gathered = report([("a", verdict)], [], newest_known={"axolotl": "0.21.0"})
    assert as_concise(gathered).split("\n")[-1] == (
        "1 info in 1 input; 7 rules asked, known up to axolotl 0.21.0; 1 undecided (--show-undecided); "
        "axolotl is not stated: ax-y, ax-z depend on it; torch is not stated: ax-z depends on it"
    )


def test_json_keeps_its_schema(full: Report) -> None:
    document = json.loads(as_json(full))
    check(document)
    check(json.loads(as_json(full, show_undecided=True, explain=True)))
    assert document["findings"][0]["observed"] == {"a": True, "n": None, "mods": ["x"]}
    assert document["summary"] == {
        "inputs": 1, "error": 1, "warning": 1, "info": 1, "rules": 9, "undecided": 2, "omitted": 0, "passed_over": 0,
        "accepted": 0, "newest_known": {}, "open_releases": {"megatron-core": ["oc-x"]},
    }  # fmt: skip
    assert document["errors"][0]["try"] == "another"


@pytest.mark.parametrize(
    "error",
    [UnusableInput("cannot read 'x'", expected="a file", attempt="another"), KeyError("x"), RecursionError()],
)
def test_a_call_that_fails_is_json_too(error: Exception) -> None:
    check(json.loads(error_as_json("internal", error)))


def test_a_limit_leaves_out_the_mildest_and_counts_them() -> None:
    verdict = LintResult((finding("aa-b", 9, Severity.WARNING), finding("la-pp", 3)), ())
    limited = report([("a", verdict)], [], limit=1)
    assert [found.rule for found in limited.findings] == ["la-pp"]
    assert (limited.omitted, limited.counts[Severity.WARNING]) == (1, 1)
    assert "1 not shown (--limit)" in as_concise(limited)


def test_findings_of_several_inputs_are_in_one_order() -> None:
    verdicts = [
        ("b", LintResult((finding("xx-b", 1, place=Place("b", 1, 1)),), ())),
        (
            "a",
            LintResult(
                (finding("xx-w", 1, Severity.WARNING), finding("xx-a", 1, place=Place("a", 9, 1))), ()
            ),
        ),
    ]
    assert [found.rule for found in report(verdicts, []).findings] == ["xx-a", "xx-b", "xx-w"]


def test_github_commands_are_escaped(full: Report) -> None:
    lines = as_github(full).split("\n")
    assert lines[0].startswith("::error file=dir/run.yaml,line=3,col=5,title=la-pp::")
    assert "100%25 sure" in lines[0]
    assert lines[2].startswith("::notice ")
    assert lines[3].startswith("::error title=unusable input::cannot read 'x'")
    odd = as_github(report([("a", LintResult((finding(place=Place("a,b:c.yaml", 1, 1)),), ()))], []))
    assert "file=a%2Cb%3Ac.yaml" in odd


def test_sarif_keeps_the_official_schema(full: Report) -> None:
    """The schema beside this file is OASIS's own, unchanged: sarif-2.1/schema of oasis-tcs/sarif-spec."""
    schema = json.loads(Path(__file__).with_name("sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
    for each in (full, report([], []), report([("a", LintResult((), ()))], [])):
        jsonschema.validate(json.loads(as_sarif(each)), schema, cls=jsonschema.Draft4Validator)


@pytest.mark.parametrize(
    ("named", "relative"),
    [
        ("my runs/a b.yaml", "my runs/a b.yaml"),
        ("./ümläut/#1%20?.yaml", "ümläut/#1%20?.yaml"),
        ("{here}/a:b.yaml", "a:b.yaml"),
        ("\udcff.yaml", "\udcff.yaml"),
        ("../beside/run.yaml", "../beside/run.yaml"),
        ("/elsewhere/ü/run.yaml", "file:///elsewhere/ü/run.yaml"),
    ],
)
def test_a_file_has_one_name_in_ci_however_the_call_named_it(named: str, relative: str) -> None:
    """In SARIF it is a URI reference of RFC 3986; a name that is no UTF-8 keeps its bytes."""
    place = Place(named.replace("{here}", str(Path.cwd())), 1, 1)
    gathered = report([("a", LintResult((finding(place=place),), ()))], [])
    (result,) = json.loads(as_sarif(gathered))["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch("(file://)?([A-Za-z0-9._~/-]|%[0-9A-F]{2})+", uri)
    assert os.fsdecode(unquote_to_bytes(uri)) == relative
    (issue,) = json.loads(as_gitlab(gathered))
    (suite,) = ElementTree.fromstring(as_junit(gathered).encode())
    path = printable(relative.removeprefix("file://"))
    assert [printable(issue["location"]["path"]), suite.get("name")] == [path, path]


def test_sarif_points_rules_and_results_at_each_other(full: Report) -> None:
    (run,) = json.loads(as_sarif(full))["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rules[result["ruleIndex"]]["id"] for result in run["results"]] == [
        r["ruleId"] for r in run["results"]
    ]
    assert [result["level"] for result in run["results"]] == ["error", "warning", "note"]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_sarif_says_where_the_tool_and_its_rules_are_described(full: Report) -> None:
    driver = json.loads(as_sarif(full))["runs"][0]["tool"]["driver"]
    for uri in (driver["informationUri"], *(rule["helpUri"] for rule in driver["rules"])):
        assert re.fullmatch(r"https://\S+", uri)
    assert driver["rules"][0]["helpUri"].endswith("#la-pp")


def test_gitlab_gets_an_issue_a_finding_each_with_its_own_fingerprint(full: Report) -> None:
    """Fields and severities are those of GitLab's Code Quality format."""
    twice = report([("a", LintResult((finding(), finding(line=9)), ()))], [])
    for gathered in (full, twice):
        issues = json.loads(as_gitlab(gathered))
        assert len(issues) == len(gathered.findings) + len(gathered.errors)
        assert len({each["fingerprint"] for each in issues}) == len(issues)
        for each in issues:
            assert each["severity"] in ("info", "minor", "major", "critical", "blocker")
            assert each["location"]["lines"]["begin"] >= 1
            assert all(each[field] for field in ("description", "check_name", "fingerprint"))
    assert json.loads(as_gitlab(report([], []))) == []


def test_junit_counts_what_fails(full: Report) -> None:
    root = ElementTree.fromstring(as_junit(full).encode())
    first, unusable = root.findall("testsuite")
    assert first.attrib == {"name": "dir/run.yaml", "tests": "3", "failures": "2", "errors": "0"}
    assert [case.get("name") for case in first] == [each.rule for each in full.findings]
    assert len(first.findall("testcase/failure")) == 2
    assert unusable.get("errors") == "1"


def test_junit_takes_any_text_and_a_file_without_findings() -> None:
    odd = finding(place=Place("<&\"\x00\x1b'>.yaml", 1, 1))
    clean = ReadAs("clean.yaml", "axolotl", "Axolotl", "adapter")
    root = ElementTree.fromstring(
        as_junit(report([("a", LintResult((odd,), ()))], [], read=[clean])).encode()
    )
    assert (root[0].get("name"), root[0].get("tests")) == ("clean.yaml", "1")
    assert len(root.findall("testsuite/testcase/failure")) == 1


def test_a_sarif_fingerprint_does_not_move_with_the_line() -> None:
    prints = [
        json.loads(as_sarif(report([("a", LintResult((finding(line=line),), ()))], [])))["runs"][0][
            "results"
        ][0]["partialFingerprints"]["offload/v1"]
        for line in (3, 30)
    ]
    assert prints[0] == prints[1]
    assert re.fullmatch("[0-9a-f]{32}", prints[0])
