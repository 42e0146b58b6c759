"""Renders a rule as its page in `docs/rules/`, and all rules as the index of that folder.

`explain` prints the same page, so that a rule is described in one way everywhere: what, why (in the framework's own
words), wrong, right, versions, fix, evidence.
"""

from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Framework
from skill_tools.rules.finding import Evidence
from skill_tools.rules.knowledge import Example, Rule, load_rules_yaml

_EFFECT = {
    "raises": "an error at startup",
    "raises-at-build": "an error when the model or the optimizer is built",
    "crashes-later": "a crash later: first step, save or resume",
    "wrong-numerics": "wrong numerics, without an error",
    "ignored": "silently ignored",
    "slow": "slow, or more memory than expected",
    "warns": "a warning only",
    "fact": "works as stated here",
}
_TAG = {
    "msg": "the source raises exactly this",
    "src": "read in the source",
    "sim": "seen by running it",
    "iss": "reported in a thread, not reproduced",
    "derived": "inferred from the source, without a test",
}
_LANGUAGE = {".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def rendered_pages(folder: Path) -> dict[Path, str]:
    """Return the path and text of every page of `folder` (docs/rules): one a rule, and the index README.md."""
    rules = load_rules_yaml()
    pages = {folder / f"{rule.id}.md": page(rule) for rule in rules}
    pages[folder / "README.md"] = index_page(rules)
    return pages


def page(rule: Rule) -> str:
    """Return the Markdown page of one rule, without any front matter."""
    parts = [
        f"# {rule.id}: {rule.title}",
        f"**{rule.severity}** · {_EFFECT[rule.effect]} · {', '.join(rule.dialects)} · {rule.mechanism}",
        f"## What\n\n{_sentence(rule.message)}{_condition(rule)}",
        f"## Why\n\n{rule.why.strip()}{_framework_words(rule)}",
        *[_examples(framework, example) for framework, example in rule.examples.items()],
        f"## Versions\n\n{_versions(rule)}",
        f"## Fix\n\n{_fix(rule)}",
        f"## Evidence\n\n{_evidence(rule.evidence)}",
    ]
    return "\n\n".join(parts) + "\n"


def index_page(rules: Sequence[Rule]) -> str:
    """Return the index of all rules, by mechanism."""
    lines = [
        "# Rules",
        "",
        f"{len(rules)} rules. `offload explain RULE` prints a page; `offload lint` finds them.",
    ]
    for mechanism in sorted({rule.mechanism for rule in rules}):
        lines += ["", f"## {mechanism}", "", "| rule | severity | frameworks | what |", "|---|---|---|---|"]
        for rule in rules:
            if rule.mechanism == mechanism:
                title = rule.title.replace("|", "\\|")
                frameworks = ", ".join(rule.dialects)
                lines.append(f"| [{rule.id}]({rule.id}.md) | {rule.severity} | {frameworks} | {title} |")
    return "\n".join(lines) + "\n"


def _condition(rule: Rule) -> str:
    if rule.when:
        return f"\n\nFound when `{' '.join(rule.when.split())}`."
    if rule.check == "log":
        return "\n\nNo configuration shows it; it is recognised by its text in a log."
    return "\n\nFound while the input is read."


def _framework_words(rule: Rule) -> str:
    if not rule.raises:
        return ""
    return "\n\nThe framework says:\n\n" + "\n\n".join(_quote(text) for text in rule.raises)


def _examples(framework: Framework, example: Example) -> str:
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


def _evidence(evidence: Evidence) -> str:
    return f"{_TAG[evidence.tag].capitalize()}: `{evidence.ref}`\n\n{_quote(evidence.quote)}"


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
