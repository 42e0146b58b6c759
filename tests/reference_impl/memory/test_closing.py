# SPDX-License-Identifier: Apache-2.0
import pytest

from reference_impl.memory.closing import close_behind, undo_all


def test_every_step_runs_last_first_and_what_failed_stays():
    ran, fails = [], {2, 4}

    def step(number):
        def run():
            ran.append(number)
            if number in fails:
                raise OSError(number)

        return run

    steps = [step(number) for number in range(6)]
    with pytest.raises(OSError, match="4"):
        undo_all(steps)
    assert ran == [5, 4, 3, 2, 1, 0]
    fails.clear()
    ran.clear()
    undo_all(steps)
    assert ran == [4, 2]
    assert steps == []


def test_closing_hides_no_exception():
    error = KeyError("the user's own")
    close_behind(error, lambda: 1 / 0)
    assert error.__notes__ == [
        "closing has failed too: ZeroDivisionError: division by zero; try close() again"
    ]
    with pytest.raises(ZeroDivisionError):
        close_behind(None, lambda: 1 / 0)
