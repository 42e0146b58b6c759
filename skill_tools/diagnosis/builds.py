# SPDX-License-Identifier: Apache-2.0
"""The first error of a compiler or linker in a log: later lines, "Error building extension" too, are its aftermath.

Compilers speak the user's language, so an error is known by its place, `file:line:column:` (or the
file alone, where somebody has cut the numbers), and by the word behind it.
"""

import re
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.diagnosis.log import Log

_PREFIX = r"^(?:\[rank\d+\]: ?|\([^)\n]*pid=\d+[^)\n]*\) ?)?"
_WORD = (
    "(?:fatal error|error|schwerwiegender Fehler|Fehler|erreur fatale|erreur|error fatal|errore(?: fatale)?"
    "|致命的?错误|错误|致命的エラー|エラー)"
)
_ERRORS = re.compile(
    _PREFIX
    + rf"(?P<error>\S*?(?:[^\s:]:\d+|\.(?:h|hpp|c|cc|cpp|cxx|cuh?))(?::\d+)?: ?{_WORD} ?[:：].*"  # gcc, clang
    + r"|\S+\(\d+\): (?:fatal )?error(?: C\d+|:).*"  # nvcc, cl
    + r"|nvcc (?:fatal|error) *:.*|nvcc: (?:No such file|not found).*|.*\bnvcc: (?:command )?not found.*"
    + r"|\S*\bld(?:\.\w+)? ?: (?:cannot find|.*undefined reference|.*No such file"
    + r"|(?!warning|skipping).{0,60}(?<!\S)-l\w).*"
    + r"|(?:\S*[cg]\+\+|\S*gcc|\S*cc1plus|\S*clang(?:\+\+)?): (?:fatal )?error: .*)",
    re.MULTILINE,
)
_BUILDS = (
    "Building extension module",
    "FAILED: ",
    "ninja: build stopped",
    "Error building",
    "Emitting ninja build file",
)


# A program does not start without a library, or with one of another release, whether or not anything was built here.
_LOADER = re.compile(
    _PREFIX + r"(?P<error>.*\b(?:error while loading shared libraries|ImportError|OSError): "
    r"(?:lib[\w.+-]+: cannot open shared object file|\S*\.so[\w.]*: undefined symbol: (?!curand)\w+).*)",
    re.MULTILINE,
)


_UNLOADED = ("cannot open shared object file", "undefined symbol: ")


class BuildError(NamedTuple):
    """The first error of a compiler or linker: its line in the log, its text, its meaning and its remedy."""

    line: int
    text: str
    cause: str
    change: tuple[str, ...]


def first_error(log: Log) -> BuildError | None:
    """Return the first error of a build, or of a loader without a library; None without any."""
    match = _ERRORS.search(log.text) if any(each in log.text for each in _BUILDS) else None
    if match is None and any(each in log.text for each in _UNLOADED):
        match = _LOADER.search(log.text)
    if match is None:
        return None
    text = match["error"].strip()
    for entry in knowledge.index()["builds"]:
        if found := re.search(entry["error"], text):
            named = found.groupdict("")
            return BuildError(
                log.line_at(match.start("error")),
                text,
                entry["cause"].format(**named),
                tuple(each.format(**named) for each in entry["change"]),
            )
    return None
