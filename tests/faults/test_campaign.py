"""Any call may fail, and Ctrl-C come, at any moment: the step then happened, or it did not, or the optimizer says so.

One seed alone: `PYTHONPATH=. python tests/faults/campaign.py optimizers:17 --told`.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import campaign
import pytest
from settings import needs_recovery

FAST = {"optimizers": 40, "signals": 10, "memory": 30, "memory-signals": 6}
# `make test-faults` runs forty times as many, which takes longer than the slow tier may.
TIMES = int(os.environ.get("FAULT_SEEDS_TIMES", "1"))
SLOW = {
    "optimizers": 220 * TIMES,
    "layers": 20 * TIMES,
    "shards": 20 * TIMES,
    "signals": 8 * TIMES,
    "layers-signals": 5 * TIMES,
    "shards-signals": 5 * TIMES,
    "memory": 25 * TIMES,
    "memory-signals": 8 * TIMES,
}
if TIMES > 1:
    # When such a signal comes depends on the machine: what one finds, the next run may not.
    SLOW |= {"timed-signals": 8 * TIMES, "timed-layers-signals": 5 * TIMES}


def in_halves(first, count):
    """Run as many seeds of each campaign, half of them in a process of its own."""

    def half(which):
        bounds = {
            name: (first[name], first[name] + count[name] // 2, first[name] + count[name]) for name in count
        }
        return campaign.run(*(f"{name}:{each[which]}:{each[which + 1]}" for name, each in bounds.items()))

    with ThreadPoolExecutor(2) as threads:
        return [result for results in threads.map(half, range(2)) for result in results]


@pytest.fixture(scope="module")
def results():
    # In one process, whose start takes seconds.
    return campaign.run(*(f"{name}:0:{count}" for name, count in FAST.items()))


def assert_all_pass(results, name, count):
    found = [result for result in results if result.campaign == name]
    assert len(found) == count
    assert all(result.passes for result in found), campaign.report(found)


@pytest.mark.parametrize("name", FAST)
def test_every_case_is_exact_or_says_that_it_is_broken(results, name):
    assert_all_pass(results, name, FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_many_more_seeds(name):
    needs_recovery(name)
    assert_all_pass(in_halves({name: FAST.get(name, 0)}, {name: SLOW[name]}), name, SLOW[name])
