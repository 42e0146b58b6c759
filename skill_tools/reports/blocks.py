# SPDX-License-Identifier: Apache-2.0
"""The findings of one lint call for people: a block each, with the source line, the consequence and the change.

Apart because only this form looks at a terminal: it keeps to the terminal's width, and has colours where there is one
(`skill_tools.terminal` says when). A pipe's reader is often an agent that pays for each word: it gets no marks,
and the place of several findings once. The colours are written here, because importing rich, which other commands
draw their progress with, takes longer than linting a file. Explained in docs/design.md (decision 14).
"""

import re
import sys
from collections.abc import Iterator, Mapping

from skill_tools import terminal
from skill_tools.errors import printable
from skill_tools.reports.findings import Report, folded, read_lines, summary, undecided_lines
from skill_tools.rules.finding import CONSEQUENCES, Finding, Severity

_WIDTH_OF_A_FILE = 100
_NARROWEST, _WIDEST = 50, 140
_COLOURS = {Severity.ERROR: "1;31", Severity.WARNING: "1;33", Severity.INFO: "1;36"}
_FAINT, _MARKED = "2", "1"
_INDENT = "  "


def as_blocks(
    report: Report, *, show_undecided: bool = False, explain: bool = False, quiet: bool = False
) -> str:
    """Return the whole report as text; `explain` adds to each finding why it holds, and whence that is known.

    With `quiet`, the inputs and the last line are left out.
    """
    paper = Paper.of_stdout()
    parts = ["\n".join(map(paper.line, read_lines(report)))] if report.read and not quiet else []
    above: Finding | None = None
    led_to: set[str] = set()
    for finding, others in folded(report.findings):
        is_first = above is None or above.place != finding.place  # the line is shown once in a row
        lines = list(_source_line(finding, report.texts, paper))
        heading = _heading(finding, paper, is_first=is_first)
        message = finding.beside or finding.message if lines else finding.message
        block = [*_block(finding, message, others, paper, explain), *_what_follows(finding, led_to, paper)]
        parts.append("\n".join([heading, *(lines if is_first else []), *block]))
        above = finding
    if show_undecided:
        parts.append("\n".join(map(paper.line, undecided_lines(report))))
    return "\n\n".join([*filter(None, parts), *([] if quiet else [paper.line(summary(report))])])


class Paper:
    """The page: so many columns wide, a terminal or a file, with colours or without."""

    def __init__(self, width: int | None, *, colours: bool, is_file: bool = False) -> None:
        self.width = max(_NARROWEST, min(width or _WIDTH_OF_A_FILE, _WIDEST))
        self._colours, self._is_file, self._keeps_lines = colours, is_file, is_file and width is None

    @classmethod
    def of_stdout(cls) -> "Paper":
        """Return the terminal of standard output, or a page of fixed width for a file or pipe."""
        is_file = not terminal.is_for_people(sys.stdout)
        width = terminal.columns(sys.stdout)
        return cls(width, colours=terminal.has_colours(sys.stdout), is_file=is_file)

    @property
    def is_file(self) -> bool:
        """Whether the output goes to another program."""
        return self._is_file

    def coloured(self, text: str, colour: str) -> str:
        """Return `text` in a colour, if there are any."""
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours else text

    def line(self, text: str) -> str:
        """Return `text` as one line, for programs that search a file; wrapped if a width is known."""
        return printable(text) if self._keeps_lines else self.wrapped(text)

    def wrapped(self, text: str, first: str = "", rest: str = _INDENT) -> str:
        """Return `text` on lines that fit the page, or hold one word: the first after `first`, others after `rest`."""
        lines, line = [], first
        for word in printable(text).split():
            if len(line) + len(word) > self.width and line.strip():
                lines.append(line.rstrip())
                line = rest
            line += f"{word} "
        return "\n".join([*lines, line.rstrip()])


def _heading(finding: Finding, paper: Paper, *, is_first: bool) -> str:
    where = paper.coloured(printable(str(finding.place)), _MARKED)
    severity = paper.coloured(str(finding.severity), _COLOURS[finding.severity])
    said = f"{severity} {finding.rule}: {CONSEQUENCES[finding.effect]}"
    return f"{where} {said}" if is_first or not paper.is_file else said


def _block(finding: Finding, message: str, others: int, paper: Paper, explain: bool) -> Iterator[str]:
    yield paper.wrapped(message, _INDENT)
    for number, text in enumerate(finding.text):
        yield _part(paper, "or" if number else "the framework says", text)
    for condition in _conditions(finding, others):
        yield paper.wrapped(condition, _INDENT)
    if explain:
        yield _part(paper, "why", " ".join(finding.why.split()))
        yield _part(paper, "source", finding.evidence.ref)
    yield _part(paper, "change", finding.next)
    for line in finding.fix.diff.splitlines():
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---")):
            yield f"{_INDENT * 2}{printable(line)}"


def _what_follows(finding: Finding, led_to: set[str], paper: Paper) -> Iterator[str]:
    """Yield the remedy's consequences, without values, and the words once: several remedies may lead to one rule."""
    for each in finding.after:
        said = "as above" if each.rule in led_to else f"{each.message.partition(': ')[0]} → {each.remedy}"
        led_to.add(each.rule)
        yield _part(paper, "after this", f"{each.severity} {each.rule}: {said}")


def _part(paper: Paper, name: str, text: str) -> str:
    lines = paper.wrapped(text, f"{_INDENT}{name}: ", _INDENT * 2)
    return lines.replace(f"{name}:", paper.coloured(f"{name}:", _MARKED), 1)


def _conditions(finding: Finding, others: int) -> Iterator[str]:
    if finding.unless:
        yield f"unless the recipe or its environment sets {', '.join(finding.unless)}"
    if finding.depends_on:
        more = f", and in {others} more input{'s' * (others > 1)}" if others else ""
        yield f"only with {', '.join(finding.depends_on)} (state yours with --target){more}"


def _source_line(finding: Finding, texts: Mapping[str, str], paper: Paper) -> Iterator[str]:
    """Yield the line that the finding points at, cut to the page around the spot, and marks below the spot."""
    lines = texts.get(finding.place.file, "").split("\n")
    if finding.place.line > len(lines) or not lines[finding.place.line - 1].strip():
        return
    line, start = lines[finding.place.line - 1].rstrip("\r"), finding.place.column - 1
    spot = re.match(r"[^\s:=,;#]*", line[start:])
    before, marked = _shown(line[:start]), _shown(spot[0] if spot else "")
    rest = _shown(line[start:])[len(marked) :]
    number = str(finding.place.line)
    room = paper.width - len(number) - 5
    if len(before) > room // 2:
        before = "…" + before[-room // 2 :]
    marked = marked[: max(1, room - len(before))]
    rest = rest[: max(0, room - len(before) - len(marked))]
    gutter = paper.coloured(f"{_INDENT}{number} |", _FAINT)
    below = paper.coloured(f"{_INDENT}{' ' * len(number)} |", _FAINT)
    colour = _COLOURS[finding.severity]
    yield f"{gutter} {before}{paper.coloured(marked, _MARKED)}{rest}".rstrip()
    if not paper.is_file:
        yield f"{below} {' ' * len(before)}{paper.coloured('^' * max(1, len(marked)), colour)}"


def _shown(text: str) -> str:
    return printable(text.replace("\t", "    "))
