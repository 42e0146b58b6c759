# SPDX-License-Identifier: Apache-2.0
"""Adds the CPU's updates to a trace: the profiler sees only the threads that it was started on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trace_overlap import STEP

from reference_impl.optimizers.cpu.update import CpuKernel

CATEGORY = "cpu_update"
# A thread's number, begin and end, in nanoseconds of `time.perf_counter_ns`.
Span = tuple[int, int, int]


@contextmanager
def watched_updates() -> Iterator[list[Span]]:
    """Yield a list to which every update of a task adds its span while the context is open."""
    spans: list[Span] = []
    update = CpuKernel.update

    def timed(self: CpuKernel, *args: Any) -> None:
        begin = time.perf_counter_ns()
        update(self, *args)
        spans.append((threading.get_ident(), begin, time.perf_counter_ns()))

    CpuKernel.update = timed  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        CpuKernel.update = update  # type: ignore[method-assign]


def add_lane(path: Path, spans: list[Span], mark_ns: int) -> None:
    """Write `spans` into the trace at `path`; `mark_ns` is when its last mark `STEP` began."""
    trace = json.loads(path.read_text())
    marks = [
        e["ts"] for e in trace["traceEvents"] if e.get("name") == STEP and e.get("cat") == "user_annotation"
    ]
    first = min(e["ts"] for e in trace["traceEvents"] if e.get("ph") == "X")
    number: dict[int, int] = {}
    for thread, begin, end in spans:
        start = max(marks) + (begin - mark_ns) / 1e3
        if start >= first:
            trace["traceEvents"].append(
                {
                    "ph": "X",
                    "cat": CATEGORY,
                    "name": "update on the CPU",
                    "pid": "CPU updates",
                    "tid": number.setdefault(thread, len(number)),
                    "ts": start,
                    "dur": (end - begin) / 1e3,
                }
            )
    path.write_text(json.dumps(trace))
