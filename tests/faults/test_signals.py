"""Ctrl-C at any moment: what is saved after it is the state before the step or after it."""

import pytest
from test_campaign import STILL_FAILS, assert_all_pass, run_in_halves

FAST, SLOW = 20, 300


@STILL_FAILS
def test_interrupts():
    assert_all_pass(run_in_halves("signals", 0, FAST), FAST)


@pytest.mark.slow
@STILL_FAILS
def test_many_interrupts():
    assert_all_pass(run_in_halves("signals", FAST, FAST + SLOW), SLOW)
