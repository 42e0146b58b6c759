# SPDX-License-Identifier: Apache-2.0
"""The answer when no shape is known: the card's decision table, compared with the configuration.

It computes nothing. Each row of `card.yaml`'s decisions is kept with its situation. If its condition can be read from
the configuration, the row also says whether it applies here.
"""

from collections.abc import Mapping
from typing import NamedTuple

from skill_tools.bundle import root
from skill_tools.configs.config import Config
from skill_tools.configs.keys import load_keys
from skill_tools.rules.conditions import parse
from skill_tools.rules.grammar import ConditionError
from skill_tools.rules.operations import UNKNOWN
from skill_tools.rules.values import Scope
from skill_tools.rules.versions import resolve


class Situation(NamedTuple):
    """One row of the table; `applies` is None where the configuration cannot say."""

    situation: str
    when: str
    recommend: str
    why: str
    rule: str
    applies: bool | None


def table(config: Config, versions: Mapping[str, str]) -> tuple[Situation, ...]:
    """Return the card's rows: applicable ones first, then undecided ones."""
    from skill_tools.card.load import load_card  # needs PyYAML, which a plan does not

    scope = Scope(config, load_keys(), resolve(config.versions, versions))
    rows = [
        Situation(
            row["situation"],
            row["when"],
            row["recommend"],
            row["why"],
            row.get("rule", ""),
            _applies(row["when"], scope),
        )
        for row in load_card(root() / "card.yaml").get("decisions", [])
    ]
    order = {True: 0, None: 1}
    return tuple(
        sorted((row for row in rows if row.applies is not False), key=lambda row: order[row.applies])
    )


def _applies(when: str, scope: Scope) -> bool | None:
    try:
        answer = parse(when).holds(scope)
    except (ConditionError, SyntaxError, ValueError):
        return None  # a situation in words, for the reader to judge
    return None if answer is UNKNOWN else bool(answer)
