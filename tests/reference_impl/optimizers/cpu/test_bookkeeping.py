"""Memory that runs out in the bookkeeping of an update thread, at any bytecode: the step is exact, or lost by name."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

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
        state = optimizer.state_dict()["state"]
        return "exact", [*params, *(value for each in state.values() for value in each.values())]
    finally:
        optimizer.close()


@contextmanager
def fails_before(nth: int) -> Iterator[list[int]]:
    """Raise MemoryError before bytecode `nth` of the update threads' bookkeeping; yield the list of how many ran."""
    count = [0]

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        # Where a lock is let go of nothing is allocated, and nothing can fail.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).lstrip()
        if event == "opcode" and not line.startswith("with "):
            count[0] += 1
            if count[0] == nth:
                raise MemoryError(f"before bytecode {nth}")
        return each

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(BOOKKEEPING):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        # Python 3.12 sends opcode events only if a frame asked for them before tracing began.
        frame.f_trace_opcodes = True
        sys.settrace(enter)
        return enter(frame, event, argument)

    threading.settrace(trace)
    try:
        yield count
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


# Before a thread's first line, Python itself tells of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.skip(reason="the errors that it injects leave signals deferred and memory held in this process")
@pytest.mark.parametrize("stride", [397, pytest.param(7, marks=pytest.mark.slow)])
def test_no_step_is_torn_or_stuck(stride: int):
    with fails_before(-1) as count:
        _, expected = trained()
    outcomes = []
    for nth in range(1, count[0], stride):
        with fails_before(nth):
            status, found = trained()
        outcomes.append(status)
        for one, other in zip(found, expected, strict=bool(found)):
            assert torch.equal(one, other), f"before bytecode {nth}"
    # Which of them a sample meets depends on the threads.
    assert "exact" in outcomes
    assert set(outcomes) <= {"not constructed", "exact", "broken"}
