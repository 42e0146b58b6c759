# SPDX-License-Identifier: Apache-2.0
"""Variables and arrays of a script, and the expansion of words with them.

A value is a list of fields, a field a list of pieces; each piece keeps its place in the script, so `$ARGS`
leads to the line that put the flag into it. An unknown part stays as its own text, marked as not resolved.
"""

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.words import OPAQUE, QUOTED_VARIABLE, TEXT, VARIABLE, Part, Word, split
from skill_tools.errors import UnusableInput

MAX_PIECES = 100_000
MAX_DEPTH = 20

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[1-9]\d*|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
_TILDE = re.compile(r"((?:[A-Za-z_]\w*=)?)~(?=/)")
_BLANKS = re.compile(r"\s+|\S+")
_BETWEEN_COMMANDS = frozenset({";", "&", "&&", "|", "||"})
_SHELLS = frozenset({"bash", "sh", "zsh"})
_LOGIN = frozenset({"-lc", "-ic", "-ec", "-lic", "-ilc", "-exc", "-cl"})
_AROUND = re.compile(r"[`\"';]|\$\(|\)")
_ABOVE = re.compile(r"(?:/\.\.)+/?")
_SCRIPT = frozenset(
    {"$0", "${0}", "$BASH_SOURCE", "${BASH_SOURCE}", "${BASH_SOURCE[0]}", "${BASH_SOURCE:-$0}"}
)
_FOLDERS = frozenset({"PWD", "0%/*", "BASH_SOURCE%/*", "BASH_SOURCE[0]%/*"})  # `${0%/*}`
_OF_A_FOLDER = frozenset(
    {
        *("cd", "dirname", "realpath", "readlink", "pwd", "-f", "-e", "-P", "--", "&&"),
        *(">", "&>", "2>", "/dev/null", ">/dev/null", "&>/dev/null", "2>/dev/null", "2>&1"),
    }
)


class Piece(NamedTuple):
    """A stretch of expanded text, the place it comes from, and whether it is known and surely there."""

    text: str
    line: int
    column: int
    resolved: bool = True
    certain: bool = True


Field = list[Piece]


class Assignment(NamedTuple):
    """`name=value`, `name+=value`, or an array when `fields` is not None."""

    name: str
    adds: bool
    value: Field
    fields: list[Field] | None = None


def as_argument(field: Field, *, certain: bool = True) -> Argument:
    """Join the pieces of `field`; the place is that of the first with text."""
    text = "".join(piece.text for piece in field)
    first = next((piece for piece in field if piece.text), field[0] if field else Piece("", 0, 0))
    resolved = all(piece.resolved for piece in field)
    return Argument(
        text, first.line, first.column, resolved, certain and all(piece.certain for piece in field)
    )


def commands_inside(fields: Iterable[Field]) -> list[list[Argument]]:
    """Return the commands in the text of `fields` for another shell, each behind the words before that text.

    Their quotes are gone, and their variables and exports unknown. A line's end parts no
    commands: it may go on.
    """
    words = _words_inside(fields)
    start = behind_c(words) or 1
    commands: list[list[Argument]] = [[]]
    quotes = 0
    for word in words[start:]:
        quotes += word.text.count('"')
        ends = quotes % 2 == 0 and (word.text in _BETWEEN_COMMANDS or word.text.endswith(";"))
        bare = word.text.rstrip(";&|") if ends else word.text
        if bare:
            commands[-1].append(word._replace(text=bare))
        if ends:
            commands.append([])
    before = words[:start]
    return [
        [_unquoted(word) for word in (*before, *each)]
        for each in commands
        if each and each[0].text != "export"
    ] or [before]


def behind_c(words: Sequence[Argument]) -> int:
    """Return where the text behind `-c` begins, or behind a shell's `-lc`; 0 where there is none."""
    texts = [word.text for word in words]
    for at, text in enumerate(texts):
        if text == "-c" or (text in _LOGIN and at and texts[at - 1].rpartition("/")[2] in _SHELLS):
            return at + 1
    return 0


def _words_inside(fields: Iterable[Field]) -> list[Argument]:
    """Return the words in `fields`; the output of a `$(..)` is one, whatever blanks it holds."""
    found: list[Argument] = []
    depth = 0
    for word in (as_argument(part) for field in fields for part in split_field(field)):
        if word.text == "\\":  # a line that goes on
            continue
        if depth:
            found[-1] = found[-1]._replace(text=f"{found[-1].text} {word.text}")
        else:
            found.append(word)
        if depth or "$(" in word.text:
            depth = max(0, depth + word.text.count("(") - word.text.count(")"))
    return found


def _unquoted(argument: Argument) -> Argument:
    text = argument.text.replace('"', "").replace("'", "").replace("\\", "")
    return argument._replace(text=text, resolved=argument.resolved and "$" not in text)


def own_folder(command: str) -> str:
    """Return the folder worked out by `$(..)`, relative to the script's own; empty if it is no folder.

    `$(cd "$(dirname "$0")/.." && pwd)` is `./..`. The working folder is as good as the script's own: relative names are
    looked for in both.
    """
    words = _AROUND.sub(" ", command).split()
    above = [word for word in words if _ABOVE.fullmatch(word)]
    if set(words) - _OF_A_FOLDER - _SCRIPT - set(above):
        return ""
    levels = words.count("dirname") - 1 + sum(word.count("..") for word in above)
    is_script = not _SCRIPT.isdisjoint(words) and "dirname" in words
    return "." + "/.." * levels if is_script else "." if words == ["pwd"] else ""


def split_field(field: Field) -> list[Field]:
    """Split a field at blanks, as an unquoted expansion is."""
    fields: list[Field] = []
    current: Field | None = None
    for piece in field:
        if not piece.resolved:
            current = [*(current or []), piece]
            continue
        line, column = piece.line, piece.column
        for found in _BLANKS.finditer(piece.text):
            text = found[0]
            if text.isspace():
                fields += [current] if current else []
                current = None
            else:
                current = [*(current or []), piece._replace(text=text, line=line, column=column)]
            newlines = text.count("\n")
            line += newlines
            column = len(text) - text.rindex("\n") if newlines else column + len(text)
    return [*fields, current] if current else fields


class Variables:
    """The variables of one script. A name that the script never sets belongs to the caller: it is not known.

    `$1` is the caller's too, and a default in its place counts as for other names, unless `has_own_arguments`: within a
    function, and behind `set --`, others are meant.
    """

    def __init__(self, script: str) -> None:
        self.has_own_arguments = False
        self._script = script
        self._values: dict[str, list[Field]] = {}
        self._pieces = 0

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> Argument:
        """Return the first field of a variable that is set."""
        fields = self._values[name]
        return as_argument(fields[0] if fields else [])

    def options(self) -> list[Argument]:
        """Return all words of the variables that hold options or settings, in the order of their first assignment."""
        held = (
            [as_argument(part) for field in fields for part in split_field(field)]
            for fields in self._values.values()
        )
        return [
            word
            for words in held
            if any(each.text.startswith("-") or "=" in each.text for each in words)
            for word in words
        ]

    def forget(self, name: str) -> None:
        """Make a variable unknown, as a loop's is."""
        self._values[name] = [[Piece(f"${{{name}}}", 0, 0, resolved=False)]]

    def unset(self, name: str) -> None:
        """Make a variable empty, whatever the caller gave it."""
        self._values[name] = []

    def assign(self, assignment: Assignment, *, certain: bool) -> None:
        """Carry out an assignment; in a branch that may not run, the variable is no longer certain."""
        name, earlier = assignment.name, self._values.get(assignment.name, [])
        if assignment.fields is not None:
            fields = assignment.fields if certain else [_doubt(field) for field in assignment.fields]
            if not assignment.adds and not certain:
                earlier = [_doubt(field) for field in earlier]
            self._values[name] = [*earlier, *fields] if assignment.adds or not certain else fields
        elif certain:
            before = earlier[0] if assignment.adds and earlier else []
            self._values[name] = [[*before, *assignment.value]]
        else:
            place = assignment.value[0] if assignment.value else Piece("", 0, 0)
            self._values[name] = [[Piece(f"${{{name}}}", place.line, place.column, resolved=False)]]
        self._count(sum(map(len, self._values[name])))

    def assignments(self, words: list[Word]) -> tuple[list[Assignment], list[Word]]:
        """Return the assignments that `words` begin with, expanded, and the words after them."""
        found: list[Assignment] = []
        while words and (match := _assigned(words[0])):
            name, adds, rest = match[1], bool(match[2]), words[1:]
            if words[0].touches_next and rest and rest[0].operator == "(":
                end = next((at for at, word in enumerate(rest) if word.operator == ")"), len(rest))
                fields = [field for word in rest[:end] if not word.operator for field in self.expand(word)]
                found.append(Assignment(name, adds, [], fields))
                words = rest[end + 1 :]
            else:
                found.append(Assignment(name, adds, self._joined(_after(words[0], match.end()))))
                words = rest
        return found, words

    def argument(self, word: Word) -> Argument:
        """Expand a word as if it were quoted: to exactly one argument."""
        return as_argument(self._joined(word))

    def expand(self, word: Word, depth: int = 0) -> list[Field]:
        """Return the fields that `word` becomes: none, one or several."""
        fields: list[Field] = []
        current: Field | None = None
        vanishes = False
        for part in self._with_home(word):
            if part.kind in (VARIABLE, QUOTED_VARIABLE):
                values = self._parameter(part, depth)
                vanishes = vanishes or (not values and part.text.endswith(("@", "@]")))
                if part.kind == VARIABLE:
                    values = [piece for value in values for piece in split_field(value)]
                for position, value in enumerate(values):
                    if position and current is not None:
                        fields.append(current)
                        current = None
                    current = [*(current or []), *value]
            else:
                folder = own_folder(part.text) if part.kind == OPAQUE else ""
                known = part.kind != OPAQUE or bool(folder)
                current = [
                    *(current or []),
                    Piece(folder or part.text, part.line, part.column, resolved=known),
                ]
        if current is None or (vanishes and not any(piece.text for piece in current)):
            return fields
        return [*fields, current]

    def _with_home(self, word: Word) -> list[Part]:
        """Return the parts of `word` with the home folder in place of a tilde before a slash, as bash has it.

        It begins the word, or the value of `name=~/value`, and stands unquoted.
        """
        first = word.parts[0] if word.parts else None
        tilde = _TILDE.match(first.text) if first is not None and first.kind == TEXT else None
        if first is None or tilde is None:
            return word.parts
        home = "".join(piece.text for piece in self._values.get("HOME", [[]])[0]) or os.path.expanduser("~")
        return [first._replace(text=f"{tilde[1]}{home}{first.text[tilde.end() :]}"), *word.parts[1:]]

    def _joined(self, word: Word, depth: int = 0) -> Field:
        quoted = [
            Part(QUOTED_VARIABLE if part.kind == VARIABLE else part.kind, part.text, part.line, part.column)
            for part in word.parts
        ]
        return _join(self.expand(Word(quoted), depth))

    def _parameter(self, part: Part, depth: int) -> list[Field]:
        """Return the value of `$name` or `${name...}`: its fields, or its own text when it is not known."""
        if part.text in _FOLDERS and part.text not in self._values:
            return [[Piece(".", part.line, part.column)]]
        unknown = [[Piece(f"${{{part.text}}}", part.line, part.column, resolved=False)]]
        match = _PARAMETER.fullmatch(part.text)
        if match is None or depth > MAX_DEPTH:
            return unknown
        name, index, operator, alternative = match.groups()
        if name in ("@", "*"):
            return []
        if name.isdecimal() and self.has_own_arguments:
            return unknown
        fields = self._values.get(name)
        is_empty = not fields or not any(piece.text for field in fields for piece in field)
        missing = fields is None or (is_empty and operator is not None and operator.startswith(":"))
        if operator is not None and missing != operator.endswith("+"):
            fields = self._alternative(alternative, part, depth)
            if operator.endswith("="):
                self._values[name] = fields
        elif operator is not None and operator.endswith("+"):
            return []
        if fields is None:
            return unknown
        self._count(sum(map(len, fields)))
        return fields if index else fields[:1]

    def _alternative(self, text: str, part: Part, depth: int) -> list[Field]:
        column = part.column + 2 + len(part.text) - len(text)
        words = [
            word
            for word in split(text, name=self._script, line=part.line, column=column)
            if not word.operator
        ]
        return [_join(field for word in words for field in [self._joined(word, depth + 1)])]

    def _count(self, pieces: int) -> None:
        self._pieces += pieces
        if self._pieces > MAX_PIECES:
            raise UnusableInput(
                f"{self._script}: its variables expand to more than {MAX_PIECES} words",
                expected="a launch script",
                attempt="linting the command that it runs",
            )


def _join(fields: Iterable[Field]) -> Field:
    """Join fields with a blank between them, as a quoted expansion of several is."""
    joined: Field = []
    for field in fields:
        joined = (
            [*joined, Piece(" ", field[0].line, field[0].column), *field]
            if joined and field
            else joined + field
        )
    return joined


def _doubt(field: Field) -> Field:
    return [piece._replace(certain=False) for piece in field]


def _assigned(word: Word) -> re.Match[str] | None:
    first = word.parts[0] if word.parts else None
    return _ASSIGNMENT.match(first.text) if first and first.kind == TEXT else None


def _after(word: Word, length: int) -> Word:
    """Return the value part of `name=value`."""
    first = word.parts[0]
    rest = Part(TEXT, first.text[length:], first.line, first.column + length)
    return Word([rest, *word.parts[1:]])
