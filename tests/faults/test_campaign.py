"""Any call may fail at any moment: the step then happened, or it did not, or the optimizer says that it is broken."""

from concurrent.futures import ThreadPoolExecutor

import campaign
import pytest

# Each half in a process of its own.
FAST, SLOW = 200, 5_000


def run_in_halves(name, first, stop):
    middle = (first + stop) // 2
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(
            lambda seeds: campaign.run(name, seeds), (range(first, middle), range(middle, stop))
        )
        return [result for half in halves for result in half]


def assert_all_pass(results, count):
    print(campaign.report(results))
    assert len(results) == count
    assert all(result.passes for result in results), campaign.report(results)


STILL_FAILS = pytest.mark.xfail(strict=True, reason="a step that fails is neither resumed nor undone yet")


@STILL_FAILS
def test_optimizers():
    assert_all_pass(run_in_halves("optimizers", 0, FAST), FAST)


@pytest.mark.slow
@STILL_FAILS
def test_optimizers_with_many_seeds():
    assert_all_pass(run_in_halves("optimizers", FAST, FAST + SLOW), SLOW)
