# SPDX-License-Identifier: Apache-2.0
"""Draws when a traced step computed and when it copied, as an SVG with one lane each.

    python benchmarks/draw_trace.py trace.json docs/figures/layer-streaming.svg --title "LoRA, 8192 tokens"

The trace comes from `trace_overlap.record`: two steps, of which the second is drawn; of several steps, one behind the
other, the last but one.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from trace_overlap import REPEATED, STEP, Interval, communicates, computes, merge

LANES = (
    ("kernels", "#4c78a8"),
    ("NCCL", "#b279a2"),
    ("H2D", "#e45756"),
    ("D2H", "#54a24b"),
    ("CPU update", "#f2a33a"),
)
WIDTH, LEFT, LANE, BAR = 960, 90, 34, 20
# Kernels closer than this look like one: a pixel is about as wide.
GAP_US = 200.0


def lanes(events: list[dict[str, object]]) -> dict[str, list[Interval]]:
    """Return the busy intervals of each lane, in microseconds."""
    found: dict[str, list[Interval]] = {name: [] for name, _ in LANES}
    for event in events:
        name = str(event.get("name"))
        lane = {
            "kernel": "NCCL" if communicates(event) else "kernels",
            "gpu_memcpy": "H2D" if "HtoD" in name else "D2H" if "DtoH" in name else "",
            "cpu_update": "CPU update",
        }
        if (key := lane.get(str(event.get("cat")), "")) and event.get("ph") == "X":
            start = float(event["ts"])  # type: ignore[arg-type]
            found[key].append((start, start + float(event["dur"])))  # type: ignore[arg-type]
    found["kernels"] = merge((start, stop + GAP_US) for start, stop in found["kernels"])
    # Several threads, one lane.
    found["CPU update"] = merge(found["CPU update"])
    return found


def second_step(events: list[dict[str, object]]) -> dict[str, list[Interval]]:
    """Return the busy intervals of the trace's second step, from its begin, in milliseconds."""
    found = lanes(events)
    begin, end = _part(events, found)
    return {
        lane: [
            ((max(start, begin) - begin) / 1e3, (min(stop, end) - begin) / 1e3)
            for start, stop in intervals
            if stop > begin and start < end
        ]
        for lane, intervals in found.items()
    }


def _part(events: list[dict[str, object]], found: dict[str, list[Interval]]) -> Interval:
    """Return where the part to draw begins and ends, in microseconds."""
    # The host runs ahead: where the device's own marks are, they say when a step was computed, each on its stream.
    kernels = Counter(event.get("tid") for event in events if computes(event))
    computing = [event for event in events if kernels and event.get("tid") == kernels.most_common(1)[0][0]]
    repeated = _marks(computing, REPEATED, "gpu_user_annotation") or _marks(
        events, REPEATED, "user_annotation"
    )
    if len(repeated) > 1:
        return repeated[-2], repeated[-1]
    marks = _marks(events, STEP, "user_annotation")
    begin = min(start for intervals in found.values() for start, _ in intervals)
    end = max(stop for intervals in found.values() for _, stop in intervals)
    # A trace without marks is cut in the middle.
    return (marks[-1] if len(marks) > 1 else (begin + end) / 2), end


def _marks(events: list[dict[str, object]], name: str, category: str) -> list[float]:
    """Return when each mark of that name begins, in order."""
    found = [e for e in events if e.get("name") == name and e.get("cat") == category and e.get("ph") == "X"]
    return sorted(float(event["ts"]) for event in found)  # type: ignore[arg-type]


def svg(found: dict[str, list[Interval]], title: str) -> str:
    """Return the drawing."""
    drawn = [(name, colour) for name, colour in LANES if found[name]]
    if not drawn:
        raise ValueError(
            "the step to draw has no kernel, copy or update; expected a trace made on a CUDA device"
        )
    end_ms = max(stop for intervals in found.values() for _, stop in intervals)
    scale = (WIDTH - LEFT - 30) / end_ms
    height = 40 + LANE * len(drawn) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    for index, (name, colour) in enumerate(drawn):
        top = 36 + LANE * index
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{name}</text>')
        parts += rectangles(name, found[name], scale, top, colour)
    bottom = 36 + LANE * len(drawn)
    for mark in range(0, int(end_ms) + 1, 50 if end_ms < 800 else 100 if end_ms < 1600 else 500):
        x = LEFT + mark * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="32" y2="{bottom}" stroke="#ccc" stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{mark} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def rectangles(name: str, intervals: Iterable[Interval], scale: float, top: int, colour: str) -> list[str]:
    """Return one bar an interval, with its times to point at; those less than half a pixel apart are one."""
    half = 0.5 / scale
    joined = [
        (start, stop - half) for start, stop in merge((start, stop + half) for start, stop in intervals)
    ]
    return [
        f'<rect x="{LEFT + start * scale:.1f}" y="{top}" width="{max((stop - start) * scale - 0.6, 0.4):.1f}" '
        f'height="{BAR}" fill="{colour}"><title>{name}, {start:.1f} to {stop:.1f} ms</title></rect>'
        for start, stop in joined
    ]


def draw(trace: Path, figure: Path, title: str) -> None:
    """Write the drawing of a trace, gzipped or not, to `figure`."""
    raw = trace.read_bytes()
    text = gzip.decompress(raw) if trace.suffix == ".gz" else raw
    figure.write_text(svg(second_step(json.loads(text)["traceEvents"]), title))


def main() -> None:
    """Read a trace, write the drawing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a Chrome trace, gzipped or not")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--title", default="", help="one line above the lanes")
    args = parser.parse_args()
    draw(args.trace, args.svg, args.title)


if __name__ == "__main__":
    main()
