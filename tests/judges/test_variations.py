# SPDX-License-Identifier: Apache-2.0
"""Rules give their recorded answers to recorded variations, and slips in them are noticed; `mutations.py` tries
more."""

import subprocess
import sys
from pathlib import Path

import pytest
import shipped

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from variations import differing, recorded  # noqa: E402

RULES = {rule.id: rule for rule in shipped.RULES if rule.when}
AGAIN = "read the verdicts, then record them: python tests/judges/variations.py"


def test_every_recorded_variation_has_its_verdict() -> None:
    problems = [
        line
        for name, record in recorded().items()
        for line in differing(name, RULES[name].condition if name in RULES else None, record)
    ]
    assert not problems, "\n".join([f"{AGAIN} RULE ..", *problems])


@pytest.mark.slow
def test_every_condition_is_recorded() -> None:
    missing = sorted(RULES.keys() - recorded().keys())
    assert not missing, f"{AGAIN}; missing: {', '.join(missing)}"


@pytest.mark.slow
def test_a_sample_of_slips_is_noticed() -> None:
    command = [
        sys.executable,
        str(HERE / "mutations.py"),
        "--removed",
        "10",
        "--changed",
        "20",
        "--seed",
        "3",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
