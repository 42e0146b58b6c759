# SPDX-License-Identifier: Apache-2.0
"""The releases that a log states: DeepSpeed's first line, Unsloth's banner, `pip freeze`, and reports of environments.

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
    for match in _stated().finditer(edges):
        if is_version(match["version"]):
            found.setdefault(canonical_name(match["name"]), set()).add(match["version"])
    for name, pattern in (("vllm", _VLLM), ("torch", _TORCH)):
        for match in pattern.finditer(edges):
            found.setdefault(name, set()).add(match["version"])
    return {name: next(iter(versions)) for name, versions in found.items() if len(versions) == 1}


@knowledge.derived
def _stated() -> re.Pattern[str]:
    """Return the pattern of a stated release, of each known distribution or of another name of it."""
    facts, index = knowledge.index()["releases"], knowledge.index()
    names = {*facts["known"], *facts["aliases"], *(fix["package"] for fix in index["fixes"])}
    names |= {name for fault in index["numbers"]["faults"] for name in fault.get("releases", ())}
    any_of_them = "|".join(
        re.escape(name).replace(r"\-", "[-_]") for name in sorted(names, key=len, reverse=True)
    )
    return re.compile(
        rf"(?<![\w/.-])[`'\"]?(?P<name>{any_of_them})[`'\"]?(?:{_BETWEEN})v?(?P<version>{_RELEASE})(?:\+[\w.]+)?"
        r"(?![\w-])(?! (?:or|and) (?:newer|later|above|higher))",
        re.IGNORECASE,
    )
