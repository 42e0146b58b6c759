"""Find settings in a training configuration that break it, contradict each other or do nothing.

Reads Megatron Bridge, Megatron-LM and Axolotl configurations: YAML, launch scripts, Python recipes (never run),
DeepSpeed JSON, command line overrides. Each file is its own configuration; with --overrides or --compose, all files
are one, composed in the framework's own precedence:

  offload lint run.yaml other.yaml
  offload lint recipe.py --overrides "model.cpu_offloading=true" overrides.yaml
  offload lint run.sh --target megatron-core==0.16.1 --target transformer-engine==2.12

Exit codes: 0 no finding at or above --fail-on, 1 findings, 2 unusable input, 3 a fault of this tool. With --diff they
describe the files before the fixes, with --fix the files after them.
A comment `# offload: ignore[RULE] reason` on a finding's line, or above it, suppresses it.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from skill_tools.commands import releases
from skill_tools.configs.config import Config
from skill_tools.configs.source import MAX_BYTES, Source, decode, load
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_sources, recognised
from skill_tools.errors import UnusableInput
from skill_tools.reports.findings import Report, report
from skill_tools.rules import suppress
from skill_tools.rules.finding import LintResult, Severity
from skill_tools.rules.knowledge import load_rules
from skill_tools.rules.lint import lint
from skill_tools.rules.repair import Lint, Repaired, repair

_SEVERITIES = tuple(Severity)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add inputs, targets, output and fixes."""
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "files", nargs="*", metavar="FILE", help="configurations; recipe.py::function selects one recipe"
    )
    inputs.add_argument(
        "--overrides",
        action="append",
        default=[],
        metavar="TEXT",
        help="overrides as on the command line; repeatable",
    )
    inputs.add_argument("--compose", action="store_true", help="treat all files as one configuration")
    inputs.add_argument("--framework", choices=registry.names(), help="default: detected from the content")
    inputs.add_argument("--stdin", action="store_true", help="read a configuration from standard input")
    inputs.add_argument(
        "--stdin-filename", default="<stdin>", metavar="NAME", help="its name, for format and messages"
    )
    inputs.add_argument("--skip-unrecognized", action="store_true", help="skip files of no known framework")
    versions = parser.add_argument_group("releases")
    versions.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="a release to lint for, such as megatron-core==0.16.1; repeatable",
    )
    versions.add_argument("--versions", metavar="FILE", help="output of pip list or pip freeze")
    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=("concise", "json", "github", "sarif"), default="concise")
    output.add_argument(
        "--fail-on", choices=[str(name) for name in Severity], default="warning", help="default: warning"
    )
    output.add_argument("--limit", type=_count, metavar="N", help="show only the N worst findings")
    output.add_argument(
        "--show-undecided", action="store_true", help="list the rules that missing values leave undecided"
    )
    fixes = parser.add_argument_group("fixes")
    fixes.add_argument("--fix", action="store_true", help="apply safe fixes to the files")
    fixes.add_argument(
        "--diff",
        action="store_true",
        help="print what --fix would change, write nothing, and count what remains on stderr",
    )
    fixes.add_argument(
        "--unsafe-fixes", action="store_true", help="include fixes that may change what a run computes"
    )


def run(args: argparse.Namespace) -> int:
    """Lint every configuration that the arguments describe; return the exit code."""
    releases.check(args.target)
    versions = releases.stated(args)
    results: list[tuple[str, LintResult]] = []
    errors: list[UnusableInput] = []
    for names in _groups(args):
        try:
            sources = [_source(name, args) for name in names]
            if args.skip_unrecognized and not _recognized(sources, args):
                continue
            linted = partial(_linted, args=args, versions=versions)
            config, result = linted(sources)
            if args.fix or args.diff:
                result = _repair(sources, linted, result, args)
        except UnusableInput as error:
            errors.append(error)
            print(f"offload: {error}", file=sys.stderr)
            continue
        for note in config.missing_file_notes():
            print(f"offload: {note}", file=sys.stderr)
        results.append((names[0] if names else "<overrides>", result))
    gathered = report(results, errors, limit=args.limit)
    if not args.diff:
        print(_rendered(gathered, args))
    return _exit_code(gathered, failing=_fails(gathered, Severity(args.fail_on)))


def _groups(args: argparse.Namespace) -> list[list[str]]:
    """Group the inputs into configurations: each its own, or all one."""
    names = [*([args.stdin_filename] if args.stdin else []), *args.files]
    if not names and not args.overrides:
        raise UnusableInput(
            "there is nothing to lint",
            expected="FILE, --stdin or --overrides",
            attempt="offload lint run.yaml",
        )
    _tell_overrides_from_files(args)
    return [names] if args.compose or args.overrides else [[name] for name in names]


def _tell_overrides_from_files(args: argparse.Namespace) -> None:
    """Raise `UnusableInput` for a setting among the files, or a file as an override: here one text is one override."""
    stray = [name for name in args.files if args.overrides and "=" in name and not os.path.exists(name)]
    if stray:
        raise UnusableInput(
            f"{stray[0]!r} stands among the files",
            expected="one TEXT after --overrides, in quotes where it holds several settings",
            attempt=f'--overrides "{args.overrides[-1]} {" ".join(stray)}"',
        )
    taken = [text for text in args.overrides if os.path.isfile(text)]
    if taken:
        raise UnusableInput(
            f"--overrides took the file {taken[0]!r}",
            expected="settings after --overrides",
            attempt=f"offload lint {taken[0]} --overrides TEXT",
        )


def _source(name: str, args: argparse.Namespace) -> Source:
    if args.stdin and name == args.stdin_filename:
        if args.fix:
            raise UnusableInput(
                "standard input cannot be fixed in place", expected="a file", attempt="--diff"
            )
        return Source(name, decode(sys.stdin.buffer.read(MAX_BYTES + 1), name))
    return load(name)


def _recognized(sources: Sequence[Source], args: argparse.Namespace) -> bool:
    if args.framework:
        return True
    try:
        recognised(sources, args.overrides)
    except UnusableInput:
        return False
    return True


def _linted(
    sources: Sequence[Source], *, args: argparse.Namespace, versions: Mapping[str, str]
) -> tuple[Config, LintResult]:
    """Read, lint, and leave out what the user suppressed."""
    config = read_sources(sources, overrides=args.overrides, framework=args.framework)
    result = lint(config, versions=versions, with_diffs=args.format == "json")
    return config, suppress.apply(result, config, load_rules())


def _repair(
    sources: Sequence[Source], linted: Lint, found: LintResult, args: argparse.Namespace
) -> LintResult:
    """Fix `sources` on disk and return what is left, or print the difference and return `found`."""
    from skill_tools.rules.fixes import unified_diff

    repaired = repair(sources, linted, unsafe=args.unsafe_fixes)
    for before, after in zip(sources, repaired.sources, strict=True):
        if before.text != after.text and args.diff:
            print(unified_diff(before.name, before.text, after.text), end="")
        elif before.text != after.text:
            Path(before.name).write_text(after.text, encoding="utf-8", newline="")
    if args.diff:
        _say_what_stays(repaired, sources, args)
        return found
    if repaired.applied:
        print(f"offload: {repaired.applied} fixed in {sources[0].name}", file=sys.stderr)
    return repaired.result


def _say_what_stays(repaired: Repaired, sources: Sequence[Source], args: argparse.Namespace) -> None:
    """Say on stderr how many errors and warnings the printed difference leaves; nothing where it leaves none."""
    counts = Counter(finding.severity for finding in repaired.result.findings)
    left = [
        f"{counts[severity]} {severity}{'s' * (counts[severity] > 1)}"
        for severity in (Severity.ERROR, Severity.WARNING)
        if counts[severity]
    ]
    if not left:
        return
    kind = "fix" if args.unsafe_fixes else "safe fix"
    shown = (
        f"{repaired.applied} {kind}{'es' * (repaired.applied > 1)} shown"
        if repaired.applied
        else f"no {kind}"
    )
    one = sum(counts[severity] for severity in (Severity.ERROR, Severity.WARNING)) == 1
    names = " ".join(source.name for source in sources)
    where = f"offload lint {names}" if names and not args.stdin else "offload lint without --diff"
    print(f"offload: {shown}; {', '.join(left)} {'remains' if one else 'remain'}: {where}", file=sys.stderr)


def _rendered(result: Report, args: argparse.Namespace) -> str:
    match args.format:
        case "json":
            from skill_tools.reports.findings import as_json

            return as_json(result)
        case "github":
            from skill_tools.reports.ci_findings import as_github

            return as_github(result)
        case "sarif":
            from skill_tools.reports.ci_findings import as_sarif

            return as_sarif(result)
    from skill_tools.reports.findings import as_concise

    return as_concise(result, show_undecided=args.show_undecided)


def _fails(result: Report, fail_on: Severity) -> bool:
    return any(result.counts[severity] for severity in _SEVERITIES[: _SEVERITIES.index(fail_on) + 1])


def _exit_code(result: Report, *, failing: bool) -> int:
    return 2 if result.errors else int(failing)


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return count
