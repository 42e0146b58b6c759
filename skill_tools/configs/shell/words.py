# SPDX-License-Identifier: Apache-2.0
"""Splits a shell script into words and operators, each word made of parts that know their place.

Quoting, escapes, line continuations, comments, expansions and here-documents are told apart here and nowhere else.
Nothing is expanded or run here: `variables` gives the words a value.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from skill_tools.errors import UnusableInput

MAX_PARTS = 20_000
MAX_EXPANSION = 1 << 16  # characters of `$(...)`, of which a here-document may be an eighth
MAX_NESTING = 64

TEXT, QUOTED, VARIABLE, QUOTED_VARIABLE, OPAQUE = "text", "quoted", "variable", "quoted variable", "opaque"

_OPERATORS = re.compile(r"&&|\|\||;;&|;;|;&|&>>|&>|\|&|[;&|()\n]|\d*(?:<<<|<<-?|<>|<&|>>|>&|>\||[<>])")
_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|([0-9@*#?$!_-]))")
_OPENS = {"$(": ")", "${": "}", "(": ")", '"': '"', "`": "`"}
_INSIDE = re.compile(
    r"\\.|\$[({]|<<-?[ \t]*[\"'\\]?(?P<document>\w+)|[\s;(]#|[^\s\\$<'\"`(){}#;]+", re.DOTALL
)
_CONTINUED = re.compile(r"(?:\\\r?\n)+")
_TO_FILL_IN = re.compile(
    r"<[A-Za-z](?:[^<>\n|;&]{0,100}[^<>\s|;&])?>"
)  # `<your model>`, which is no redirection
_PLAIN = re.compile(r"[^ \t\r\n;&|()<>\"'\\$`#]+")


class Part(NamedTuple):
    """A piece of a word: literal text, an expansion (`text` is that in its braces), or a command's output."""

    kind: str
    text: str
    line: int
    column: int


class Word:
    """A word, or an operator such as `&&`, `;`, `(` or a newline."""

    def __init__(self, parts: Iterable[Part] = (), *, operator: str = "") -> None:
        self.parts = list(parts)
        self.operator = operator
        self.touches_next = False

    def moved(self, line: int, column: int) -> "Word":
        """Return the same word as if all of it stood at one place."""
        word = Word((part._replace(line=line, column=column) for part in self.parts), operator=self.operator)
        word.touches_next = self.touches_next
        return word

    @property
    def literal(self) -> str:
        """The word's text when it is one unquoted literal, such as a keyword; else empty."""
        return self.parts[0].text if len(self.parts) == 1 and self.parts[0].kind == TEXT else ""


def split(text: str, *, name: str, line: int = 1, column: int = 1) -> list[Word]:
    """Return the words and operators of `text`, whose first character stands at `line` and `column` of `name`.

    Raises `UnusableInput` for a text of more than `MAX_PARTS` parts of words.
    """
    return _Lexer(text, name, line, column).words()


def _closing(text: str, start: int, stop: int, closer: str, *, quoted: bool) -> int:
    """Return the end of the expansion that began before `start`: the position of its `closer`, -1 if not before `stop`.

    Quotes, escapes, comments, here-documents and expansions inside it are passed over. `quoted` says that it stands
    between double quotes.
    """
    open_parts = [(closer, quoted)]
    at = start
    while at < stop and len(open_parts) <= MAX_NESTING:
        inner, literal = open_parts[-1]
        found = _INSIDE.match(text, at)
        piece = found[0] if found else text[at]
        at += len(piece)
        if piece == inner:
            open_parts.pop()
            if not open_parts:
                return at - 1
        elif inner == "`" or (piece == "(" and inner != ")"):
            continue
        elif piece in _OPENS:
            open_parts.append((_OPENS[piece], inner == '"' or literal))
        elif inner == '"':
            continue
        elif piece == "'" and not (literal and inner == "}"):
            end = text.find("'", at)
            at = len(text) if end < 0 else end + 1
        elif inner == ")" and found and found["document"] and text[at : at + 1] != ")":
            at = _document_end(text, at, found["document"])
        elif inner == ")" and piece[-1] == "#" and len(piece) == 2:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
    return -1


def _document_end(text: str, start: int, delimiter: str) -> int:
    """Return the end of the here-document announced before `start`; `start` itself if its end is not near."""
    pattern = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*$", re.MULTILINE)
    end = pattern.search(text, start, start + MAX_EXPANSION // 8)
    return end.end() if end else start


class _Lexer:
    """One pass over the text; `_at` is the position of the next character."""

    def __init__(self, text: str, name: str, line: int, column: int) -> None:
        self._text = text
        self._name = name
        self._at = 0
        self._line = line
        self._line_start = 1 - column
        self._words: list[Word] = []
        self._documents: list[str] = []
        self._parts = 0
        self._is_unclosed = False

    def words(self) -> list[Word]:
        """Read everything."""
        while self._at < len(self._text):
            self._next()
        return self._words

    def _next(self) -> None:
        character = self._text[self._at]
        if character in " \t\r":
            self._at += 1
        elif continued := _CONTINUED.match(self._text, self._at):
            self._advance(continued.end())
        elif character == "#":
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif character == "<" and _TO_FILL_IN.match(self._text, self._at):
            self._word()
        elif operator := _OPERATORS.match(self._text, self._at):
            self._operator(operator[0])
        else:
            self._word()

    def _operator(self, operator: str) -> None:
        self._words.append(Word(operator=operator))
        self._advance(self._at + len(operator))
        if operator == "\n":
            for delimiter in self._documents:
                self._skip_document(delimiter)
            self._documents.clear()
        elif operator.lstrip("0123456789") in ("<<", "<<-"):
            quoted = re.compile(r"[ \t]*([\"'\\]?)(\w+)\1?").match(self._text, self._at)
            if quoted:
                self._documents.append(quoted[2])
                self._at = quoted.end()

    def _skip_document(self, delimiter: str) -> None:
        end = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
        self._advance(end.end() if end else len(self._text))

    def _word(self) -> None:
        word = Word()
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                self._escape(word)
            elif character == "'":
                self._single(word, self._at + 1)
            elif self._text.startswith("$'", self._at):
                self._single(word, self._at + 2)
            elif character == '"':
                self._double(word)
            elif character in "$`":
                self._expansion(word, quoted=False)
            elif plain := _PLAIN.match(self._text, self._at):
                self._part(word, TEXT, plain[0], plain.end())
            elif character == "#":
                self._part(word, TEXT, "#", self._at + 1)
            elif character == "<" and (found := _TO_FILL_IN.match(self._text, self._at)):
                self._part(word, OPAQUE, found[0], found.end())
            else:
                break
        word.touches_next = self._text[self._at : self._at + 1] == "("
        self._words.append(word)

    def _escape(self, word: Word) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if following == "\n":
            self._advance(self._at + 2)
        else:
            self._part(word, QUOTED, following, self._at + 2)

    def _single(self, word: Word, start: int) -> None:
        end = self._text.find("'", start)
        end = len(self._text) if end < 0 else end
        self._literal(word, self._text[start:end], start, end + 1)

    def _double(self, word: Word) -> None:
        self._at += 1
        self._part(word, QUOTED, "", self._at)
        while self._at < len(self._text) and self._text[self._at] != '"':
            character = self._text[self._at]
            if character in "$`":
                self._expansion(word, quoted=True)
            elif character == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                self._escape(word)
            else:
                stop = re.compile(r"[^$`\"\\]*").match(self._text, self._at + 1)
                end = stop.end() if stop else self._at + 1
                self._literal(word, self._text[self._at : end], self._at, end)
        self._at += 1

    def _literal(self, word: Word, text: str, start: int, end: int) -> None:
        """Add quoted text, one part a line, so that each keeps its place."""
        self._at = start
        for piece in text.splitlines(keepends=True) or [""]:
            self._part(word, QUOTED, piece, self._at + len(piece))
        self._at = end

    def _expansion(self, word: Word, *, quoted: bool) -> None:
        start = self._at
        if name := _NAME.match(self._text, start):
            kind = QUOTED_VARIABLE if quoted else VARIABLE
            self._part(word, kind, name[1] or name[2], name.end())
        elif self._text.startswith("${", start):
            end = self._closing(start + 2, "}", quoted=quoted)
            self._part(word, QUOTED_VARIABLE if quoted else VARIABLE, self._text[start + 2 : end], end + 1)
        elif self._text.startswith("$(", start):
            self._output(word, self._closing(start + 2, ")"), 2)
        elif self._text[start] == "`":
            self._output(word, self._closing(start + 1, "`"), 1)
        else:
            self._part(word, QUOTED, "$", start + 1)

    def _closing(self, start: int, closer: str, *, quoted: bool = False) -> int:
        """Return the end of an expansion; an open one, which no shell would run, ends with its line.

        After one such the rest is not searched to its end again.
        """
        line_end = self._text.find("\n", start)
        line_end = len(self._text) if line_end < 0 else line_end
        stop = line_end if self._is_unclosed else min(len(self._text), start + MAX_EXPANSION)
        end = _closing(self._text, start, stop, closer, quoted=quoted)
        self._is_unclosed = self._is_unclosed or end < 0
        return line_end if end < 0 else end

    def _output(self, word: Word, end: int, opening: int) -> None:
        """Add a command's output; a comment between backquotes, as people write them into long commands, has none."""
        command = self._text[self._at + opening : end].strip()
        if command and not (command.startswith("#") and "\n" not in command):
            self._part(word, OPAQUE, self._text[self._at : end + 1], end + 1)
        else:
            self._count()
            self._advance(end + 1)

    def _part(self, word: Word, kind: str, text: str, end: int) -> None:
        self._count()
        word.parts.append(Part(kind, text, self._line, self._at - self._line_start + 1))
        self._advance(end)

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise UnusableInput(
                f"{self._name}:{self._line} is past the first {MAX_PARTS} words",
                expected="a launch script",
                attempt="linting the command that it runs",
            )

    def _advance(self, end: int) -> None:
        end = min(end, len(self._text))
        newlines = self._text.count("\n", self._at, end)
        if newlines:
            self._line += newlines
            self._line_start = self._text.rindex("\n", self._at, end) + 1
        self._at = end
