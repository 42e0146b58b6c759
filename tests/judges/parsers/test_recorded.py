"""Our readers answer as the frameworks' own parsers did: the table of first cases and a seed of each campaign.

`recorded.json` holds the real answers; `parser_campaign.py --record` writes them. The campaigns need the releases.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parser_campaign import PARSERS, RECORDED, answered

_ANSWERS: dict[str, dict[str, list[Any]]] = json.loads(RECORDED.read_text(encoding="utf-8"))


def test_every_parser_and_release_is_recorded() -> None:
    assert {name: set(of) for name, of in _ANSWERS.items()} == {
        name: set(each.releases) for name, each in PARSERS.items()
    }


@pytest.mark.parametrize(
    ("name", "release"), [(name, release) for name in _ANSWERS for release in _ANSWERS[name]]
)
def test_our_reader_answers_as_the_parser_did(name: str, release: str) -> None:
    different = [
        (question, real, ours)
        for question, real in _ANSWERS[name][release]
        if not PARSERS[name].agrees(real, ours := answered(PARSERS[name], question, release))
    ]
    assert not different


@pytest.mark.parametrize("name", list(PARSERS))
def test_the_record_holds_accepted_and_refused_inputs(name: str) -> None:
    kinds = {kind for answers in _ANSWERS[name].values() for _, answer in answers for kind in answer}
    assert kinds == {"value", "raised"}
