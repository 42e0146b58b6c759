"""Any call may fail: the step then happened, or it did not, or the optimizer says that it is broken.

The judge and the injector are those of `tests/faults`; docs/reliability.md has the contract.
"""

import judge
import pytest
from settings import layers_settings


def outcomes(seeds):
    matrix = layers_settings()
    for seed in seeds:
        case = judge.case_of(seed, matrix=matrix)
        yield seed, case, judge.judge(case)


def assert_all_pass(seeds):
    failed = [
        f"{seed}: {case}: {outcome}" for seed, case, outcome in outcomes(seeds) if not outcome.verdict.passes
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:closed without what was on the device", "ignore:module forward hook")
def test_each_seed_is_exact_or_says_that_it_is_broken():
    assert_all_pass(range(35))
