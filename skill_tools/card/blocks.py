# SPDX-License-Identifier: Apache-2.0
"""The rendered blocks of a Markdown file: their places, and their text from the card.

`<!-- card:NAME -->` to `<!-- /card -->` holds one of the card's tables or recommended settings, `<!-- run: WORDS -->`
to `<!-- /run -->` the real output of one command of the tool; WORDS may end in `| head -n N`. Everything outside
the blocks is written by hand and left as it is. A table is a pure function of the card, so a document is stale
exactly when its text differs.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from skill_tools.card.load import Card
from skill_tools.card.measurements import measured_tables
from skill_tools.dialects import registry

Execute = Callable[[Sequence[str]], str]

_CARD = re.compile(
    r"^<!-- card:(?P<name>[a-z-]+) -->\n(?P<body>.*?)^<!-- /card -->$", re.MULTILINE | re.DOTALL
)
_RUN = re.compile(r"^<!-- run: (?P<words>[^\n]+) -->\n(?P<body>.*?)^<!-- /run -->$", re.MULTILINE | re.DOTALL)


def fill(text: str, tables: Mapping[str, str], execute: Execute) -> str:
    """Return `text` with each block's body replaced; raises `KeyError` for a block without a table.

    `execute` takes a command's words, without the program's name, and returns its output.
    """

    def card_table(block: re.Match[str]) -> str:
        return f"<!-- card:{block['name']} -->\n{tables[block['name']].rstrip()}\n<!-- /card -->"

    def output(block: re.Match[str]) -> str:
        printed = _printed(block["words"], execute)
        fence = "````" if "```" in printed else "```"
        session = f"{fence}console\n$ python3 skill_tools {block['words']}\n{printed}\n{fence}"
        return f"<!-- run: {block['words']} -->\n{session}\n<!-- /run -->"

    return _RUN.sub(output, _CARD.sub(card_table, text))


def _printed(words: str, execute: Execute) -> str:
    """Return the output of the command, cut by `| head -n N` at the end of its words."""
    command, cut, lines = words.partition(" | head -n ")
    printed = execute(shlex.split(command)).rstrip()
    return "\n".join(printed.splitlines()[: int(lines)]) if cut else printed


def has_blocks(text: str) -> bool:
    """Tell whether anything in `text` is rendered."""
    return _CARD.search(text) is not None or _RUN.search(text) is not None


def bodies(card: Card) -> dict[str, str]:
    """Return the Markdown of every block, by the block's name."""
    return {
        "decisions": _decisions(card),
        "keys": _keys(card),
        "mechanisms": _mechanisms(card),
        "constraints": _backed(card["known_constraints"]),
        "limitations": _backed(card["known_limitations"]),
        "failures": _failures(card),
        "questions": _questions(card),
        "interactions": _interactions(card),
        "corrections": _corrections(card),
        "meanings": _meanings(card),
        "sources": _sources(card),
        **path_blocks(card),
        **measured_tables(card),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a pipe inside a cell is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def _code(value: str | None) -> str:
    return f"`{value}`" if value else "none"


def _decisions(card: Card) -> str:
    def row(decision: Card) -> tuple[str, str, str]:
        rule = f" (`{decision['rule']}`)" if "rule" in decision else ""
        return decision["situation"], decision["recommend"], decision["why"] + rule

    return table(("Situation", "Use", "Why"), map(row, card["decisions"]))


def _keys(card: Card) -> str:
    """Return a column for each framework that the card has a switch of."""
    mechanisms = card["mechanisms"].values()
    names = [name for name in registry.names() if any(name in one["frameworks"] for one in mechanisms)]
    return table(
        ("Mechanism", *(registry.named(name).heading for name in names)),
        ((one["name"], *(_code(one["frameworks"].get(name)) for name in names)) for one in mechanisms),
    )


def _mechanisms(card: Card) -> str:
    return table(
        ("Mechanism", "Moves to the host", "Frees on the GPU", "Costs"),
        ((one["name"], one["moves"], one["frees"], one["costs"]) for one in card["mechanisms"].values()),
    )


def _backed(statements: Iterable[Card]) -> str:
    return "\n".join(
        f"- {one['text']}" + (f" (`{one['rule']}`)" if "rule" in one else "") for one in statements
    )


def _failures(card: Card) -> str:
    def row(mode: Card) -> tuple[str, str, str]:
        cause = mode["likely_cause"] + (f" (`{mode['rule']}`)" if "rule" in mode else "")
        return mode["symptom"], cause, mode["fix"]

    return table(("Symptom", "Cause", "Fix"), map(row, card["failure_modes"]))


def _questions(card: Card) -> str:
    def answer(mode: Card) -> str:
        rule = f" Rule: `{mode['rule']}`." if "rule" in mode else ""
        cause, confirm, fix = (_sentence(mode[part]) for part in ("likely_cause", "confirm", "fix"))
        return f"### {mode['symptom']}\n\n{cause} To confirm: {confirm}\n**Fix:** {fix}{rule}"

    return "\n\n".join(map(answer, card["failure_modes"]))


def _sentence(text: str) -> str:
    head = text if "=" in text.split()[0] or "_" in text.split()[0] else text[:1].upper() + text[1:]
    return head.rstrip(".") + "."


def _interactions(card: Card) -> str:
    def row(one: Card) -> tuple[str, str, str, str]:
        demand = f"needs {one['requires']}" if "requires" in one else f"excludes {one['forbids']}"
        return _code(one["when"]), demand, one.get("versions", "all"), _code(one["rule"])

    return table(("Setting", "Constraint", "Versions", "Rule"), map(row, card["interactions"]))


def _corrections(card: Card) -> str:
    return table(
        ("Often said", "By the sources", "Versions", "Rule"),
        (
            (one["claim"], one["fact"], one["versions"], _code(one["rule"]) if "rule" in one else "measured")
            for one in card["seed_corrections"]
        ),
    )


def _meanings(card: Card) -> str:
    return table(("Key", "Meaning"), ((_code(key), text) for key, text in card["feature_meaning"].items()))


def _sources(card: Card) -> str:
    return table(
        ("Source", "Commit", "Date", "Branch or release"),
        (
            (one["repo"], _code(one["commit"][:12]), one["date"], one["describes"])
            for one in card["upstreams"].values()
        ),
    )


def path_blocks(card: Card) -> dict[str, str]:
    """Return the blocks `path-MECHANISM`: one fenced block a framework that has the mechanism."""
    return {
        f"path-{mechanism}": "\n\n".join(_path_block(name, settings) for name, settings in frameworks.items())
        for mechanism, frameworks in card["recommended_path"].items()
    }


def _path_block(framework: str, settings: Mapping[str, object]) -> str:
    dialect = registry.named(framework)
    text = as_text(framework, settings)
    return f"{dialect.label}, {dialect.form}:\n\n```{dialect.language}\n{text}\n```"


def as_text(framework: str, settings: Mapping[str, object]) -> str:
    """Return the settings as the framework's user writes them, one a line."""
    exports = [f"export {key[4:]}={value}" for key, value in settings.items() if key.startswith("env.")]
    own = {key: value for key, value in settings.items() if not key.startswith("env.")}
    assigns = registry.named(framework).assigns
    lines = (
        _flag(key, value) if key.startswith("--") else f"{key}{assigns}{_plain(value)}"
        for key, value in own.items()
    )
    return "\n".join([*exports, *lines])


def _flag(key: str, value: object) -> str:
    if value is True:
        return key
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    return " ".join([key, *words])


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(str(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value)
