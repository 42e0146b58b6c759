# SPDX-License-Identifier: Apache-2.0
"""The output of lint: its options, its formats, and where it goes."""

import argparse

from skill_tools.configs.files import write_text
from skill_tools.reports.findings import Report
from skill_tools.rules.finding import Severity

FORMATS = ("blocks", "concise", "json", "github", "gitlab", "junit", "sarif")
_FOR_PEOPLE = ("blocks", "concise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of options."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=FORMATS,
        default="blocks",
        metavar="FORMAT",
        help="blocks (default), concise (one line a finding), json, or for CI github, gitlab, junit, sarif",
    )
    output.add_argument(
        "--explain",
        action="store_true",
        help="say why each finding holds (blocks and json), and which proof an unknown file lacks",
    )
    output.add_argument("--quiet", "-q", action="store_true", help="print findings and nothing else")
    output.add_argument("--statistics", action="store_true", help="count each rule instead (blocks, concise)")
    output.add_argument("--output-file", "-o", metavar="FILE", help="write there instead of printing")
    output.add_argument(
        "--fail-on",
        choices=[str(name) for name in Severity],
        help="the mildest severity that fails; default: warning",
    )
    output.add_argument("--limit", type=_count, metavar="N", help="show only the N worst findings")
    output.add_argument(
        "--show-undecided", action="store_true", help="list the rules that missing values leave undecided"
    )


def put(report: Report, args: argparse.Namespace) -> None:
    """Print `report`, or write it into --output-file; raises `UnusableInput` if that fails."""
    text = _rendered(report, args)
    if args.output_file:
        write_text(args.output_file, f"{text}\n" if text else "")
        return
    # A hook that has passed everything over is silent.
    has_words = report.read or report.errors or args.format not in _FOR_PEOPLE
    if has_words and (text or not (args.quiet or args.statistics)):
        print(text)


def _rendered(report: Report, args: argparse.Namespace) -> str:
    """Return the report's text in the requested format; each format is imported where it is used."""
    show_undecided, explain, quiet = args.show_undecided, args.explain, args.quiet
    if args.statistics and args.format in _FOR_PEOPLE:
        from skill_tools.reports.findings import as_statistics

        return as_statistics(report)
    match args.format:
        case "json":
            from skill_tools.reports.findings import as_json

            return as_json(report, show_undecided=show_undecided, explain=explain)
        case "concise":
            from skill_tools.reports.findings import as_concise

            return as_concise(report, show_undecided=show_undecided, quiet=quiet)
        case "blocks":
            from skill_tools.reports.blocks import as_blocks

            return as_blocks(report, show_undecided=show_undecided, explain=explain, quiet=quiet)
    from skill_tools.reports import ci_findings

    render = {
        "github": ci_findings.as_github,
        "gitlab": ci_findings.as_gitlab,
        "junit": ci_findings.as_junit,
        "sarif": ci_findings.as_sarif,
    }
    return render[args.format](report)


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return count
