"""Renders the card's tables as Markdown, one function a table.

`bodies` names every block that a document may hold. Each is a pure function of the card, so a document is
stale exactly when its text differs.
"""

from collections.abc import Iterable, Sequence

from skill_tools.card.load import Card
from skill_tools.card.measurements import measured_tables
from skill_tools.card.settings import path_blocks

FRAMEWORKS = {
    "megatron-bridge": "Megatron Bridge",
    "megatron-lm": "Megatron-LM",
    "axolotl": "Axolotl",
    "pytorch": "PyTorch (`reference_impl`)",
}


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
    return table(
        ("Mechanism", *FRAMEWORKS.values()),
        (
            (mechanism["name"], *(_code(mechanism["frameworks"][name]) for name in FRAMEWORKS))
            for mechanism in card["mechanisms"].values()
        ),
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

    return table(("With", "It", "Versions", "Rule"), map(row, card["interactions"]))


def _corrections(card: Card) -> str:
    return table(
        ("Often said", "What the sources say", "Versions", "Rule"),
        (
            (one["claim"], one["fact"], one["versions"], _code(one["rule"]) if "rule" in one else "measured")
            for one in card["seed_corrections"]
        ),
    )


def _meanings(card: Card) -> str:
    return table(("Key", "Meaning"), ((_code(key), text) for key, text in card["feature_meaning"].items()))


def _sources(card: Card) -> str:
    return table(
        ("Source", "Commit", "Date", "What it is"),
        (
            (one["repo"], _code(one["commit"][:12]), one["date"], one["describes"])
            for one in card["upstreams"].values()
        ),
    )
