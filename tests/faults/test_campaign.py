# SPDX-License-Identifier: Apache-2.0
"""Any call may fail, and Ctrl-C come, at any moment: the step then happened, or it did not, or the optimizer says so.

One seed alone: `python tests/faults/campaign.py optimizers:17 --told`.
"""

import os
import subprocess
import sys
from pathlib import Path

import campaign
import pytest
from mutations import MUTATIONS
from settings import needs_recovery

FAST = {
    "optimizers": 4,
    "begun": 3,
    "users": 3,
    "writers": 3,
    "muon": 2,
    "python": 3,
    "calls": 3,
    "calls-signals": 2,
    "readers": 2,
    "signals": 2,
    "memory": 2,
    "memory-signals": 1,
}
# `make test-faults` runs fifty times as many, which takes longer than the slow tier may.
TIMES = int(os.environ.get("FAULT_SEEDS_TIMES", "1"))
SLOW = {
    "optimizers": 126 * TIMES,
    "begun": 27 * TIMES,
    "layers-begun": 20 * TIMES,
    "users": 57 * TIMES,
    "writers": 87 * TIMES,
    "muon": 48 * TIMES,
    "muon-signals": 10 * TIMES,
    "muon-python": 10 * TIMES,
    "muon-calls": 10 * TIMES,
    "muon-begun": 20 * TIMES,
    "python": 32 * TIMES,
    "calls": 42 * TIMES,
    "calls-signals": 68 * TIMES,
    "readers": 22 * TIMES,
    "layers": 20 * TIMES,
    "shards": 20 * TIMES,
    "signals": 16 * TIMES,
    "users-signals": 20 * TIMES,
    "writers-signals": 10 * TIMES,
    "layers-python": 10 * TIMES,
    "shards-python": 5 * TIMES,
    "memory-python": 10 * TIMES,
    "layers-signals": 5 * TIMES,
    "shards-signals": 5 * TIMES,
    "memory": 33 * TIMES,
    "memory-signals": 13 * TIMES,
}
# Each of these runs in one process.
TOGETHER = [
    ["optimizers"],
    ["users", "writers", "python", "begun", "layers-begun"],
    ["muon", "muon-signals", "muon-python", "muon-calls", "muon-begun"],
    ["calls", "calls-signals", "readers"],
    ["layers", "signals", "users-signals", "writers-signals", "layers-signals", "layers-python"],
    ["shards", "shards-signals", "shards-python"],
    ["memory", "memory-signals", "memory-python"],
]
if TIMES > 1:
    # When such a signal comes depends on the machine: the next run may not find the same.
    SLOW |= {"timed-signals": 8 * TIMES, "timed-layers-signals": 5 * TIMES}
    TOGETHER.append(["timed-signals", "timed-layers-signals"])


def jobs(first, count):
    """As many seeds of each campaign, from the first on."""
    return [f"{name}:{first.get(name, 0)}:{first.get(name, 0) + count[name]}" for name in count]


@pytest.fixture(scope="module")
def results():
    return campaign.run(*jobs({}, FAST))


def assert_all_pass(results, name, count):
    found = [result for result in results if result.campaign == name]
    assert len(found) == count
    assert all(result.passes for result in found), campaign.report(found)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_seeds_that_find_a_mutation_pass_without_it(name):
    campaign, first, stop = MUTATIONS[name].job.split(":")
    assert 0 <= int(first) < int(stop) <= FAST.get(campaign, 0) + SLOW[campaign]


@pytest.mark.parametrize("name", FAST)
def test_every_case_is_exact_or_says_that_it_is_broken(results, name):
    assert_all_pass(results, name, FAST[name])


@pytest.mark.slow
def test_one_seed_alone_is_told_from_any_folder(tmp_path):
    program = Path(campaign.__file__)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(
        [sys.executable, program, "optimizers:17", "--told"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    assert told.stdout.startswith("1 cases: 1 ")


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids=",".join)
def test_many_more_seeds(names):
    needs_recovery(names[0])
    results = campaign.run(*jobs(FAST, {name: SLOW[name] for name in names}))
    for name in names:
        assert_all_pass(results, name, SLOW[name])
