# SPDX-License-Identifier: Apache-2.0
"""Records one training step for Perfetto, and says how much of its copying ran beside computation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]
# Marks each traced step on the host's lane, so that a drawing finds where one begins.
STEP = "traced step"
# Marks each of several steps inside one of these, one behind the other.
REPEATED = "repeated step"


def record(step: Callable[[], None], path: Path) -> dict[str, float]:
    """Run `step` twice under the profiler, write a Chrome trace to `path`, return its copy times and overlap.

    Overlap is with computation: NCCL's kernels, which wait for other ranks, do not count.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(2):
            with torch.profiler.record_function(STEP):
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    kernels = merge(_intervals(events, computes))
    report = {}
    for name in ("DtoH", "HtoD"):
        copies = _intervals(
            events, lambda event, name=name: name in event["name"] and event.get("cat") == "gpu_memcpy"
        )
        copied = sum(stop - start for start, stop in copies)
        report[f"{name}_ms"] = copied / 1e3
        report[f"{name}_beside_kernels"] = (
            sum(covered(copy, kernels) for copy in copies) / copied if copied else 0.0
        )
    return report


def computes(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a trace is a kernel that computes."""
    return event.get("cat") == "kernel" and not communicates(event)


def communicates(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a trace is a kernel of NCCL's."""
    return event.get("cat") == "kernel" and str(event.get("name")).startswith("nccl")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def covered(interval: Interval, disjoint: Iterable[Interval]) -> float:
    """Return how much of `interval` lies inside `disjoint` ones."""
    start, stop = interval
    return sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in disjoint)


def _intervals(events: Iterable[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> list[Interval]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if wanted(event)]
