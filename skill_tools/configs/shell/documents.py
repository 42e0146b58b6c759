# SPDX-License-Identifier: Apache-2.0
"""Finds the files that a script writes by here-documents, `cat > ds.json <<EOF`, and reads them without running it.

Each is a source with as many empty lines before it as the script has, so that a place in it is one in the script.
Apart because few scripts write a file, and the others do not pay for its patterns.
"""

import os
import re
from collections.abc import Iterator, Mapping

from skill_tools.configs.source import Source

_DOCUMENT = re.compile(
    r"^(?P<command>[ \t]*(?:sudo[ \t]+)?(?:cat|tee)\b[^\n#]*?<<-?[ \t]*(?P<quote>[\"'\\]?)(?P<end>\w+)[\"']?[^\n]*)\n"
    r"(?P<body>(?:.*\n)*?)[\t]*(?P=end)[ \t]*$",
    re.MULTILINE,
)
_TARGET = re.compile(r">[ \t]*([^\s;&|<>]+)|\btee[ \t]+(?:-\w+[ \t]+)*([^\s;&|<>-][^\s;&|<>]*)")
_ASSIGNED = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)=(\"[^\"$`\n]*\"|'[^'\n]*'|[^\s\"'$`;&|]*)[ \t]*$", re.MULTILINE
)
_VARIABLE = re.compile(r"(?<!\\)\$\{?(\w+)\}?")
_BARE_VALUE = re.compile(r"(?<=[:\[,])([ \t]*)(\$\{\w+\})(?=[ \t]*[,\]}\n])")
_MOST = 8


def written(source: Source) -> Iterator[tuple[str, Source]]:
    """Yield each file that a script writes from a here-document: its path, normalised, and its text.

    A variable that the script does not assign by a plain text stays `${NAME}`.
    """
    held = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(source.text)}
    for found, _ in zip(_DOCUMENT.finditer(source.text), range(_MOST), strict=False):
        target = _TARGET.search(found["command"])
        if target is None:
            continue
        path = _filled((target[1] or target[2]).strip("\"'"), held)
        body = found["body"]
        if "<<-" in found["command"]:
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
        if not found["quote"]:
            body = _BARE_VALUE.sub(r'\1"\2"', _filled(body, held)).replace("\\$", "$").replace("\\\\", "\\")
        above = "\n" * source.text.count("\n", 0, found.start("body"))
        yield os.path.normpath(path), Source(f"{path} (in {source.name})", above + body, source.folder)


def _filled(text: str, held: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: held.get(found[1], f"${{{found[1]}}}"), text)
