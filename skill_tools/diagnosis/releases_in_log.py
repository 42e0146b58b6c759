# SPDX-License-Identifier: Apache-2.0
"""The releases that a log states: DeepSpeed's first line, Unsloth's banner, pip's lists, and reports of environments.

Apart because no configuration is read for it. Only an exact, uncontradicted release counts: of two stated for one
distribution, neither does.
"""

import re

from skill_tools import knowledge
from skill_tools.diagnosis.log import Log
from skill_tools.rules.versions import canonical_name, is_version

_EDGE = 1 << 17  # characters read of a long log, at its beginning and at its end: releases are stated there
# Between a name and its release stand the word, a row of dots, two signs of equality, or a colon and all of it.
_BETWEEN = (
    r"(?: info| api server)?:?[ ]{0,3}version(?: \(GPU\?\))?[ .:=]{1,40}|(?: info)? \.{3,40} |==|: ?(?=\d+\.\d+\.\d)"
    r"|[ ](?=\d{4}\.\d+\.\d+:)"
)
_RELEASE = r"\d+\.\d+(?:\.\d+)?(?:\.?(?:post|dev|rc|a|b)\d+)?"
_IN_A_LIST = 2  # distributions with their releases, each behind its name, that make a line a list of what ran
# Words of a line about other releases than the run's.
_OF_OTHERS = re.compile(
    r"(?i)requir|need|install|expect|upgrad|fix|newer|older|support|compatib|instead|tried|built|[<>~]="
)
_VLLM = re.compile(rf"LLM engine \(v(?P<version>{_RELEASE})\)")  # an engine's first line, without its name
# A build of torch's own, but not one that pip removes or that something was built for.
_TORCH = re.compile(
    rf"(?i)(?<![\w/.-])(?<!installation: )(?<!for )(?<!with )(?:py)?torch (?P<version>{_RELEASE})"
    r"\+(?:cu|cpu|rocm|xpu|git)[\w.]*(?![\w-])"
)


def releases(log: Log) -> dict[str, str]:
    """Return the release of each distribution that `log` states and does not contradict."""
    found: dict[str, set[str]] = {}
    edges = log.text if len(log.text) <= 2 * _EDGE else f"{log.text[:_EDGE]}\n{log.text[-_EDGE:]}"
    edges = f"{edges}\n"  # each line has an end
    stated, row, pair = _patterns()
    for match in (*stated.finditer(edges), *row.finditer(edges), *_of_lists(pair, edges)):
        if is_version(match["version"]):
            found.setdefault(canonical_name(match["name"]), set()).add(match["version"])
    for name, pattern in (("vllm", _VLLM), ("torch", _TORCH)):
        for match in pattern.finditer(edges):
            found.setdefault(name, set()).add(match["version"])
    return {name: next(iter(versions)) for name, versions in found.items() if len(versions) == 1}


def _of_lists(pair: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the matches of `pair` in those lines of `text` that list releases of several distributions."""
    lines: dict[int, list[re.Match[str]]] = {}
    for match in pair.finditer(text):
        lines.setdefault(text.rfind("\n", 0, match.start()) + 1, []).append(match)
    return [
        match
        for start, matches in lines.items()
        if len({canonical_name(match["name"]) for match in matches}) >= _IN_A_LIST
        and not _OF_OTHERS.search(text, start, text.index("\n", matches[-1].end()))
        for match in matches
    ]


@knowledge.derived
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of a stated release, of a table's row and of a name with a release behind it.

    The names are those of each known distribution, and other names of it.
    """
    facts, index = knowledge.index()["releases"], knowledge.index()
    names = {*facts["known"], *facts["aliases"], *(fix["package"] for fix in index["fixes"])}
    names |= {name for fault in index["numbers"]["faults"] for name in fault.get("releases", ())}
    any_of_them = "|".join(
        re.escape(name).replace(r"\-", "[-_]") for name in sorted(names, key=len, reverse=True)
    )
    name = rf"[`'\"]?(?P<name>{any_of_them})[`'\"]?"
    version = rf"v?(?P<version>{_RELEASE})(?:\+[\w.]+)?"
    return (
        re.compile(
            rf"(?<![\w/.-]){name}(?:{_BETWEEN}){version}(?![\w-])(?! (?:or|and) (?:newer|later|above|higher))",
            re.IGNORECASE,
        ),
        re.compile(
            rf"^\|? {{0,3}}{name}(?: {{2,60}}| *\| *){version} *(?:\|.*| {{2,}}\S.*)?$",
            re.IGNORECASE | re.MULTILINE,
        ),
        re.compile(rf"(?<![\w/.-]){name} {version}(?![\w.-]*\w)", re.IGNORECASE),
    )
