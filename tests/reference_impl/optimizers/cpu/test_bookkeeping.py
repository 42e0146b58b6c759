# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out in the bookkeeping of an update thread, at any bytecode: the step is exact, or lost by name."""

from __future__ import annotations

import pytest
import torch
from failing_threads import fails_before

from reference_impl import CpuUpdate, HybridDeviceOptimizer

BOOKKEEPING = tuple(f"/optimizers/cpu/{name}.py" for name in ("workers", "share", "step", "publish"))
# A bucket of two members, one of which goes on into the next bucket.
SIZES = (2**10, 3 * 2**10)
CALLS = 12


def trained() -> tuple[str, list[torch.Tensor]]:
    """Take two steps, each call as often as it raises; return the status and all that was trained."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]
    try:
        optimizer = HybridDeviceOptimizer(params, lr=1e-2, cpu=CpuUpdate(threads=2, bucket_elements=2**11))
    except RuntimeError:
        return "not constructed", []
    try:
        for number in (1, 2):
            for param in params:
                param.grad = torch.full_like(param, 0.5 * number)
            calls = [optimizer.step, optimizer.synchronize]
            for call in calls:
                for attempt in range(CALLS):
                    try:
                        call()
                        break
                    except (MemoryError, RuntimeError):
                        if optimizer.status == "broken":
                            return "broken", []
                        if optimizer.status == "begun":
                            call = optimizer.synchronize
                        assert attempt + 1 < CALLS, f"stuck, and says {optimizer.status}"
        try:
            state = optimizer.state_dict()["state"]
        except RuntimeError:
            # A thread may also end behind its last piece, which this call is the first to meet.
            if optimizer.status == "broken":
                return "broken", []
            raise
        return "exact", [*params, *(value for each in state.values() for value in each.values())]
    finally:
        optimizer.close()


# Before a thread's first line, Python itself tells of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stride", [397, pytest.param(13, marks=pytest.mark.slow)])
def test_no_step_is_torn_or_stuck(stride: int):
    with fails_before(-1, BOOKKEEPING, but_lines=("with ",)) as count:
        status, expected = trained()
    assert status == "exact"
    outcomes = []
    for nth in range(1, count[0], stride):
        with fails_before(nth, BOOKKEEPING, but_lines=("with ",)):
            status, found = trained()
        outcomes.append(status)
        for one, other in zip(found, expected, strict=bool(found)):
            assert torch.equal(one, other), f"before bytecode {nth}"
    assert set(outcomes) <= {"not constructed", "exact", "broken"}
