# SPDX-License-Identifier: Apache-2.0
"""Find settings in a training configuration that break it, contradict each other or do nothing.

Reads the configurations that people train with: YAML, JSON, launch scripts, Python recipes (never run), command line
overrides. A file's content must prove its framework; the first line of the output names it. Each file is a
configuration of its own. A folder stands for all files in it, a Python file for each recipe in it. With
--overrides or --compose all files are one configuration, composed in the framework's own precedence:

  offload lint run.yaml other.yaml configs/
  offload lint recipe.py --overrides "model.cpu_offloading=true" overrides.yaml
  offload lint run.sh --target megatron-core==0.16.1 --target transformer-engine==2.12

Releases come from --target and --versions, else from the input's comments and installs, else from requirements, lock
files, Dockerfiles and compose files beside it, else from the pins of its project's root. The first line names
the releases and their places.

Exit codes: 0 no finding at or above --fail-on, 1 findings, 2 unusable input, 3 a fault of this tool. With --diff they
describe the files before the fixes, with --fix the files after them.
A comment `# offload: ignore[RULE] reason` on a finding's line, or above it, suppresses it. The nearest offload.toml or
[tool.offload] of pyproject.toml may say select, ignore, per-file-ignores, target, framework and fail-on; options win.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from skill_tools.commands import lint_output, releases
from skill_tools.commands.lint_settings import Settings, nearest_settings, selection_of
from skill_tools.configs.config import Config
from skill_tools.configs.files import MAX_BYTES, decode, replace_text, write_text
from skill_tools.configs.folder import files_below
from skill_tools.configs.releases import Stated, stated_beside
from skill_tools.configs.source import Source, load
from skill_tools.dialects import registry
from skill_tools.dialects.read import Contradiction, Reading, check_form, readings
from skill_tools.errors import Unrecognised, UnusableInput, printable, printable_lines
from skill_tools.reports.findings import ReadAs, Report, report
from skill_tools.rules import suppress
from skill_tools.rules.finding import LintResult, Severity
from skill_tools.rules.knowledge import rules_about
from skill_tools.rules.lint import lint
from skill_tools.rules.remedies import with_remedies
from skill_tools.rules.selection import kept
from skill_tools.started import COMMAND

if TYPE_CHECKING:
    from skill_tools.rules.repair import Repaired

_SEVERITIES = tuple(Severity)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add inputs, targets, output and fixes."""
    inputs = parser.add_argument_group("inputs")
    inputs.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="configurations, or folders of them; recipe.py::function is one recipe",
    )
    inputs.add_argument(
        "--overrides",
        action="append",
        default=[],
        metavar="SETTING",
        help="overrides as on the command line, one or more words, or several in quotes; repeatable",
    )
    inputs.add_argument("--compose", action="store_true", help="treat all files as one configuration")
    inputs.add_argument(
        "--framework",
        choices=registry.names(),
        metavar="NAME",
        help=f"default: detected from the content; one of {', '.join(registry.names())}",
    )
    inputs.add_argument("--stdin", action="store_true", help="read a configuration from standard input")
    inputs.add_argument(
        "--stdin-filename", default="<stdin>", metavar="NAME", help="its name, for format and messages"
    )
    inputs.add_argument(
        "--skip-unrecognized", action="store_true", help="pass silently over files of no known framework"
    )
    versions = parser.add_argument_group("releases")
    versions.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="a release to lint for, such as megatron-core==0.16.1; repeatable",
    )
    versions.add_argument("--versions", metavar="FILE", help="output of pip list or pip freeze")
    versions.add_argument(
        "--version", action=releases.ShowKnown, nargs=0, help="print the newest releases that are known"
    )
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--select",
        action="append",
        metavar="RULE",
        help="only these rules: ids, beginnings of ids (la, ds-zenflow) or ALL, between commas; repeatable",
    )
    rules.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="RULE",
        help="not these rules, named alike; repeatable",
    )
    rules.add_argument("--baseline", metavar="FILE", help="pass over the findings that FILE has accepted")
    rules.add_argument(
        "--write-baseline", metavar="FILE", help="accept all findings of now in FILE, and report none"
    )
    lint_output.add_arguments(parser)
    fixes = parser.add_argument_group("fixes")
    fixes.add_argument("--fix", action="store_true", help="apply safe fixes to the files")
    fixes.add_argument(
        "--diff",
        action="store_true",
        help="print the changes of --fix, write nothing, and count the remaining findings on stderr",
    )
    fixes.add_argument(
        "--unsafe-fixes", action="store_true", help="include fixes that may change a run's results"
    )


def run(args: argparse.Namespace) -> int:
    """Lint every configuration that the arguments describe; return the exit code."""
    releases.check(args.target)
    if args.baseline and args.write_baseline:
        raise UnusableInput(
            "--baseline and --write-baseline are two things",
            expected="one of them",
            attempt=f"--write-baseline {args.write_baseline}, which replaces it",
        )
    linted = Linted(args, releases.stated_by_user(args))
    for group in _groups(args):
        linted.take(group)
    linted.check_any()
    if args.write_baseline:
        return linted.accept(args.write_baseline)
    gathered = linted.report()
    if not args.diff:
        lint_output.put(gathered, args)
    return 2 if gathered.errors else int(linted.fails())


class Group(NamedTuple):
    """Inputs that make up one configuration; `found` ones were not named but met in a folder."""

    names: tuple[str, ...]
    found: bool = False


class Linted:
    """The results of one call, gathered input by input."""

    def __init__(self, args: argparse.Namespace, stated: Mapping[str, Stated]) -> None:
        self._args = args
        self._stated_by_user = stated
        self._selection = selection_of(args.select, args.ignore)
        self._settings: dict[str, Settings] = {}
        self._here = Settings()
        self._baseline = _baseline(args.baseline) if args.baseline else None
        self._results: list[tuple[str, LintResult]] = []
        self._fails: list[bool] = []
        self._read: list[ReadAs] = []
        self._errors: list[UnusableInput] = []
        self._texts: dict[str, str] = {}
        self._beside: dict[str, dict[str, Stated]] = {}
        self._passed_over = 0
        self._accepted = 0
        self._newest_known: dict[str, str] = {}

    def take(self, group: Group) -> None:
        """Lint the configurations in `group`; an unusable input is kept as an error, or passed over."""
        pass_over = group.found or self._args.skip_unrecognized
        self._here = nearest_settings(os.path.dirname(group.names[0]) if group.names else "", self._settings)
        try:
            sources = self._sources(group, pass_over)
            found = self._readings(sources, pass_over) if sources is not None else []
        except UnusableInput as error:
            self._fail(error)
            return
        if not found:
            self._passed_over += 1
        for reading in found:
            try:
                self._lint(reading)
            except UnusableInput as error:
                if pass_over and isinstance(error, Unrecognised):
                    self._passed_over += 1
                else:
                    self._fail(error)

    def check_any(self) -> None:
        """Raise `UnusableInput` if no file is any framework's, unless the user wants that passed over."""
        if not (self._results or self._errors or self._args.skip_unrecognized):
            raise UnusableInput(
                f"{', '.join(self._args.files)}: no training configuration among {self._passed_over} files",
                expected="a folder with configurations of a known framework",
                attempt="naming one file: its error lists the proofs that are looked for",
            )

    def fails(self) -> bool:
        """Return whether a finding is as severe as the command line, or the settings of its input, let fail."""
        return any(self._fails)

    def accept(self, path: str) -> int:
        """Write all findings into the baseline at `path`; return the exit code."""
        from skill_tools.reports.baseline import as_baseline

        findings = [finding for _, result in self._results for finding in result.findings]
        write_text(path, as_baseline(findings, os.path.dirname(path)))
        print(f"offload: {len(findings)} findings accepted in {path}", file=sys.stderr)
        return 2 if self._errors else 0

    def report(self) -> Report:
        """Return the report of all that was taken."""
        return report(
            self._results,
            self._errors,
            limit=self._args.limit,
            read=self._read,
            passed_over=self._passed_over,
            texts=self._texts,
            newest_known=self._newest_known,
            accepted=self._accepted,
        )

    def _fail(self, error: UnusableInput) -> None:
        self._errors.append(error)
        print(f"offload: {error}", file=sys.stderr)
        if self._args.explain and isinstance(error, Unrecognised):
            print("".join(f"  {printable(each)}\n" for each in error.looked_for), end="", file=sys.stderr)

    def _sources(self, group: Group, pass_over: bool) -> list[Source] | None:
        """Load the inputs; None for a file to pass over that is no text of ours, though it is there."""
        try:
            sources = [_source(name, self._args) for name in group.names]
        except UnusableInput:
            if pass_over and all(os.path.isfile(name) for name in group.names):
                return None
            raise
        return [source.stating(partial(self._around, source)) for source in sources]

    def _around(self, source: Source) -> dict[str, str]:
        """Return the releases that the user or the folder of an input states."""
        return _versions({**self._beside_of(source.folder), **self._here.targets, **self._stated_by_user})

    def _beside_of(self, folder: Path | None) -> dict[str, Stated]:
        if folder is None:
            return {}
        name = str(folder)
        if name not in self._beside:
            self._beside[name] = stated_beside(name)
        return self._beside[name]

    def _readings(self, sources: Sequence[Source], pass_over: bool) -> list[Reading]:
        """Return each input with its framework; unknown ones are left out if they may be passed over.

        An unparsable text is unknown too: no proof was found in it.
        """
        overrides, framework = self._args.overrides, self._args.framework or self._here.framework
        if not pass_over:
            try:
                return readings(sources, overrides=overrides, framework=framework)
            except Unrecognised:
                check_form(sources)
                raise
        try:
            found = readings(sources, overrides=overrides)
        except UnusableInput as error:
            if isinstance(error, Contradiction):
                raise
            return []
        return [reading for reading in found if framework in (None, reading.dialect.name)]

    def _lint(self, reading: Reading) -> None:
        config, result = self._linted(reading)
        if (self._args.fix or self._args.diff) and not reading.is_part:
            result = self._repair(reading, result)
        for note in (*config.missing_file_notes(), *config.unread_file_notes()):
            if not self._args.quiet:
                print(f"offload: {printable(note)}", file=sys.stderr)
        stated = self._stated(config, reading)
        if self._args.format in ("blocks", "json") and not reading.is_part:
            edits = self._args.format == "json"
            result = with_remedies(result, config, versions=_versions(stated), edits=edits)
        titles = [source.title for source in reading.sources] or ["<overrides>"]
        if self._baseline is not None:
            result, known = self._baseline(result)
            self._accepted += known
        self._results.append((titles[0], result))
        self._fails.append(_fails(result, Severity(self._args.fail_on or self._here.fail_on or "warning")))
        self._texts |= {name: config.sources[name] for name in _files(result) if name in config.sources}
        named = releases.that_matter(stated, config)
        about = config.dialects().union(config.shares)
        self._newest_known |= releases.newest_known(config.dialects(), about)
        dialect = reading.dialect
        self._read.append(ReadAs(" + ".join(titles), dialect.name, dialect.label, reading.proof, named))

    def _linted(self, reading: Reading) -> tuple[Config, LintResult]:
        """Compose, lint, and leave out the findings that the user suppressed."""
        config = reading.compose(overrides=self._args.overrides)
        result = lint(config, versions=_versions(self._stated(config, reading)))
        selection = self._here.selection.below(self._selection)
        name = reading.sources[0].name if reading.sources else ""
        result = suppress.apply(result, config)
        if selection.is_everything:
            return config, result
        return config, kept(result, selection, name, rules_about(config.dialects().union(config.shares)))

    def _stated(self, config: Config, reading: Reading) -> dict[str, Stated]:
        """Return the releases of this run: the user's word goes before the input's, that before its folder's."""
        beside = self._beside_of(
            next((each.folder for each in reading.sources if each.folder is not None), None)
        )
        if not reading.sources:
            return {**beside, **self._here.targets, **self._stated_by_user}
        of_input = releases.of_input(config, beside, reading.sources[0].name)
        return {**of_input, **self._here.targets, **self._stated_by_user}

    def _repair(self, reading: Reading, found: LintResult) -> LintResult:
        """Fix the sources on disk and return the findings that stay, or print the difference and return `found`."""
        from skill_tools.rules.fixes import unified_diff
        from skill_tools.rules.repair import repair

        args = self._args

        def again(sources: Sequence[Source]) -> tuple[Config, LintResult]:
            return self._linted(reading._replace(sources=tuple(sources)))

        repaired = repair(reading.sources, again, unsafe=args.unsafe_fixes)
        for before, after in zip(reading.sources, repaired.sources, strict=True):
            if before.text != after.text and args.diff:
                diff = unified_diff(before.name, before.text, after.text)
                print(printable_lines(diff) if sys.stdout.isatty() else diff, end="")
            elif before.text != after.text:
                replace_text(before.name, after.text)
        if args.diff:
            _say_what_comes(repaired, found)
            _say_what_stays(repaired, reading.sources, args)
            return found
        if repaired.applied:
            print(f"offload: {repaired.applied} fixed in {reading.sources[0].name}", file=sys.stderr)
        return repaired.result


def _groups(args: argparse.Namespace) -> Iterator[Group]:
    """Group the inputs into configurations: each its own, or all one; a folder is each file in it."""
    _tell_overrides_from_files(args)
    names = [*([args.stdin_filename] if args.stdin else []), *args.files]
    if not names and not args.overrides:
        raise UnusableInput(
            "there is nothing to lint",
            expected="FILE, --stdin or --overrides",
            attempt=f"{COMMAND} lint run.yaml",
        )
    if args.compose or args.overrides:
        yield Group(tuple(names))
        return
    for name in names:
        if os.path.isdir(name):
            yield from (Group((found,), found=True) for found in files_below(name))
        else:
            yield Group((name,))


def _tell_overrides_from_files(args: argparse.Namespace) -> None:
    """Take settings that follow --overrides from among the files; raises `UnusableInput` for a file as an override."""
    if args.overrides:
        args.overrides = [*args.overrides, *(name for name in args.files if _is_setting(name))]
        args.files = [name for name in args.files if not _is_setting(name)]
    taken = [text for text in args.overrides if os.path.isfile(text)]
    if taken:
        raise UnusableInput(
            f"--overrides took the file {taken[0]!r}",
            expected="settings after --overrides",
            attempt=f"{COMMAND} lint {taken[0]} --overrides KEY=VALUE",
        )


def _is_setting(name: str) -> bool:
    """Return whether a word among the files is an override: `model.bf16=true`, or Hydra's `~key`."""
    return ("=" in name or name.startswith("~")) and not os.path.exists(name)


def _source(name: str, args: argparse.Namespace) -> Source:
    if args.stdin and name == args.stdin_filename:
        if args.fix:
            raise UnusableInput(
                "standard input cannot be fixed in place", expected="a file", attempt="--diff"
            )
        return Source(name, decode(sys.stdin.buffer.read(MAX_BYTES + 1), name))
    return load(name)


def _say_what_comes(repaired: "Repaired", before: LintResult) -> None:
    """Say on stderr which errors and warnings the fixes bring about; the printed difference has none of their own."""
    there = {finding.rule for finding in before.findings}
    for finding in repaired.result.findings:
        if finding.rule not in there and finding.severity is not Severity.INFO:
            said = f"after this: {finding.severity} {finding.rule}: {finding.message} → {finding.next}"
            print(f"offload: {printable(said)}", file=sys.stderr)


def _say_what_stays(repaired: "Repaired", sources: Sequence[Source], args: argparse.Namespace) -> None:
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
    where = f"{COMMAND} lint {names}" if names and not args.stdin else f"{COMMAND} lint without --diff"
    print(f"offload: {shown}; {', '.join(left)} {'remains' if one else 'remain'}: {where}", file=sys.stderr)


def _versions(stated: Mapping[str, Stated]) -> dict[str, str]:
    return {name: each.version for name, each in stated.items()}


def _files(result: LintResult) -> set[str]:
    """Return the files that findings point at."""
    return {finding.place.file for finding in result.findings}


def _baseline(path: str) -> Callable[[LintResult], tuple[LintResult, int]]:
    """Return a function that removes findings accepted in the baseline at `path` from a result, and counts them."""
    from skill_tools.reports.baseline import load_baseline, without_accepted

    return partial(without_accepted, baseline=load_baseline(path))


def _fails(result: LintResult, fail_on: Severity) -> bool:
    failing = _SEVERITIES[: _SEVERITIES.index(fail_on) + 1]
    return any(finding.severity in failing for finding in result.findings)
