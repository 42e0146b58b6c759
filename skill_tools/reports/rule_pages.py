# SPDX-License-Identifier: Apache-2.0
"""One rule as Markdown, as `explain` prints it, and in a few lines.

A rule is described in one way everywhere: fault, reason (in the framework's own words), wrong, right, versions, fix,
evidence.
"""

from pathlib import Path

from skill_tools.rules.finding import CONSEQUENCES
from skill_tools.rules.knowledge import Example, Rule

_TAG = {
    "msg": "the source raises exactly this",
    "src": "read in the source",
    "sim": "seen by running it",
    "iss": "reported in a thread, not reproduced",
    "derived": "inferred from the source, without a test",
}
_LANGUAGE = {
    ".sh": "bash",
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
}


def page(rule: Rule) -> str:
    """Return the Markdown page of one rule, without any front matter."""
    parts = [
        f"# {rule.id}: {rule.title}",
        f"**{rule.severity}** · {CONSEQUENCES[rule.effect]} · {', '.join(rule.dialects)} · {rule.mechanism}",
        f"## What\n\n{_sentence(rule.message)}{_condition(rule)}",
        f"## Why\n\n{rule.why.strip()}{_framework_words(rule)}",
        *[_examples(framework, example) for framework, example in rule.examples.items()],
        f"## Versions\n\n{_versions(rule)}",
        f"## Fix\n\n{_fix(rule)}",
        f"## Evidence\n\n{_evidence(rule)}",
    ]
    return "\n\n".join(parts) + "\n"


def brief(rule: Rule) -> str:
    """Return a rule in a few lines: its effect, the framework's own text, why, and the change."""
    lines = [
        f"{rule.id}: {rule.title}",
        f"  {rule.severity}, {CONSEQUENCES[rule.effect]}; {', '.join(rule.dialects)}; {_versions(rule).rstrip('.')}",
        *(f"  {'or' if number else 'the framework says'}: {text}" for number, text in enumerate(rule.text)),
        f"  why: {' '.join(rule.why.split())}",
        f"  change: {rule.next}",
    ]
    return "\n".join(lines) + "\n"


def _condition(rule: Rule) -> str:
    if rule.tree:
        return f"\n\nFound when `{rule.when}`."
    if rule.check == "log":
        return "\n\nNo configuration shows it; it is recognised by its text in a log."
    return "\n\nFound while the input is read."


def _framework_words(rule: Rule) -> str:
    if not rule.raises:
        return ""
    return "\n\nThe framework says:\n\n" + "\n\n".join(_quote(text) for text in rule.raises)


def _examples(framework: str, example: Example) -> str:
    language = _LANGUAGE.get(Path(example.filename).suffix, "text")
    stated = ", ".join(f"{name} {version}" for name, version in example.versions.items())
    with_releases = f" with {stated}" if stated else ""
    return (
        f"## Wrong ({framework}{with_releases})\n\n{_fence(example.bad, language)}\n\n"
        f"## Right ({framework}{with_releases})\n\n{_fence(example.good, language)}"
    )


def _versions(rule: Rule) -> str:
    if not rule.versions:
        return "All releases."
    return ", ".join(f"{package} `{specifier}`" for package, specifier in rule.versions.items())


def _fix(rule: Rule) -> str:
    lines = [
        _sentence(rule.next),
        f"{rule.fix.applicability.capitalize()}: {_sentence(rule.fix.description)}",
    ]
    changes = [f"- set `{key}` to `{value}`" for key, value in rule.fix.set.items()]
    changes += [f"- remove `{key}`" for key in rule.fix.remove]
    changes += [f"{rank}. {option}" for rank, option in enumerate(rule.fix.options, start=1)]
    return "\n\n".join([*lines, *(["\n".join(changes)] if changes else [])])


def _evidence(rule: Rule) -> str:
    tag, ref, quote = rule.evidence
    parts = [f"{_TAG[tag].capitalize()}: `{ref}`\n\n{_quote(quote)}"]
    for each in rule.evidence_in:
        releases = ", ".join(f"{name}{of}" for name, of in each.versions.items())
        parts.append(f"In {releases}: `{each.ref}`\n\n{_quote(each.quote)}")
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:] if " " in text and not text.startswith("--") else text
    return text if text.endswith((".", "!", "?", "`")) else f"{text}."


def _quote(text: str) -> str:
    return _fence(text, "text")


def _fence(text: str, language: str) -> str:
    """Return a fenced block whose fence is longer than any in `text`."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text.strip(chr(10))}\n{ticks}"
