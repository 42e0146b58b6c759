# SPDX-License-Identifier: Apache-2.0
"""Checks that all names of the card exist: rules, keys, claims, measured rows, mechanisms and source files.

A card may name a removed rule, or repeat a framework's message in other words; no schema finds that.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from skill_tools.card.load import Card
from skill_tools.card.measurements import measured_range, rows_by_id


def reference_problems(
    card: Card, *, raises: Mapping[str, Sequence[str]], spellings: Mapping[str, Collection[str]]
) -> list[str]:
    """Return one line for each dangling or contradicting reference.

    `raises` maps every rule id to the framework's own texts; `spellings` maps every canonical key to all the
    ways to write it.
    """
    problems = [*_dangling(card, "rule", raises, "no such rule")]
    problems += _dangling(card, "evidence", card["validation_status"], "no such claim")
    problems += _dangling(card, "rows", rows_by_id(card), "no such measured row")
    problems += _dangling(card, "baseline", rows_by_id(card), "no such measured row")
    problems += _dangling(card, "setting", card["measured_settings"], "no such measured setting")
    problems += _dangling(card, "mechanism", card["mechanisms"], "no such mechanism")
    problems += _dangling(card, "upstream", card["upstreams"], "no such upstream")
    problems += _unknown_keys(card, spellings)
    problems += _symptoms(card, raises)
    problems += _magnitudes(card)
    problems += _sources(card)
    return problems


def _dangling(card: Card, field: str, known: Collection[str], complaint: str) -> Iterator[str]:
    for pointer, value in _named(card, field):
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                yield f"card.yaml {pointer}: {complaint}: {name}"


def _named(node: Any, field: str, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value under the key `field`, wherever it stands, with its place."""
    if isinstance(node, dict):
        for key, value in node.items():
            at_top = pointer == ""
            if key == field and not at_top:
                yield f"{pointer}/{key}", value
            else:
                yield from _named(value, field, f"{pointer}/{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _named(value, field, f"{pointer}/{index}")


def _unknown_keys(card: Card, spellings: Mapping[str, Collection[str]]) -> Iterator[str]:
    known = {spelling for group in spellings.values() for spelling in group}
    for key in card["feature_meaning"]:
        if key not in spellings:
            yield f"card.yaml feature_meaning: no such canonical key: {key}"
    written = set(card["config_keys"])
    for frameworks in card["recommended_path"].values():
        for settings in frameworks.values():
            written |= set(settings)
    for key in sorted(written - known):
        yield f"card.yaml: no framework spells a key like this: {key}"


def _symptoms(card: Card, raises: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for mode in card["failure_modes"]:
        texts = raises.get(mode.get("rule", ""), ())
        if texts and not any(_same_words(mode["symptom"], text) for text in texts):
            yield f"card.yaml failure_modes/{mode['name']}: the symptom is no message of {mode['rule']}"


def _same_words(symptom: str, text: str) -> bool:
    """Tell whether the symptom stands in the rule's text, whose `{..}` may be anything."""
    pattern = ".*".join(re.escape(part) for part in text.split("{..}"))
    return symptom in text or re.search(pattern, symptom) is not None


def _magnitudes(card: Card) -> Iterator[str]:
    for change in card["expected_metric_change"]:
        claim, magnitude = change["evidence"], change["magnitude"]
        found = measured_range(card, claim, magnitude["unit"])
        digits = 1 if magnitude["unit"] == "GB" else 2
        stated = (magnitude["low"], magnitude["high"])
        if found is not None and stated != tuple(round(value, digits) for value in found):
            gives = " to ".join(f"{value:.{digits}f}" for value in found)
            yield f"card.yaml expected_metric_change: {claim} gives {gives}, not {stated[0]} to {stated[1]}"


def _sources(card: Card) -> Iterator[str]:
    quoted = {
        f"{claim['upstream']}: {claim['ref'].split('::')[0]}"
        for claim in card["validation_status"].values()
        if "quote" in claim
    }
    for source in sorted(quoted ^ set(card["evidence"])):
        side = "quoted by no claim" if source in card["evidence"] else "not listed"
        yield f"card.yaml evidence: {source} is {side}"
