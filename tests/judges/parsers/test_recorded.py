# SPDX-License-Identifier: Apache-2.0
"""Our readers answer as the frameworks' own parsers did: the table of first cases and a seed of each campaign.

`recorded.json` holds the real answers; `parser_campaign.py --record` writes them. The campaigns need the releases, so
that new inputs are asked of the parsers that are here: Python's and the installed PyYAML, and all that
`make test-parsers` has fetched.
"""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parser_campaign import PARSERS, RECORDED, answered, asked, missing, questions_of

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "release"), [(name, release) for name, each in PARSERS.items() for release in each.releases]
)
def test_our_reader_answers_new_inputs_as_the_parser_does(name: str, release: str) -> None:
    parser = PARSERS[name]
    if name == "yaml" and release == version("pyyaml"):
        parser = parser._replace(releases={release: ()})
    elif why := missing(parser, release):
        pytest.skip(why)
    questions = questions_of(parser, seed=9, inputs=300)[len(parser.table) :]
    different = [
        (question, real, ours)
        for question, real in zip(questions, asked(parser, release, questions), strict=True)
        if not parser.agrees(real, ours := answered(parser, question, release))
    ]
    assert not different


def test_a_parser_whose_package_is_not_installed_is_missing_by_name() -> None:
    trl = PARSERS["trl"]._replace(python=sys.executable, installed="no-such-package")
    assert re.search("lacks no-such-package 1.16.0", missing(trl, "1.16.0"))
    yaml = PARSERS["yaml"]._replace(releases={version("pyyaml"): ()}, installed="pyyaml")
    assert not missing(yaml, version("pyyaml"))
