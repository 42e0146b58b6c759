# SPDX-License-Identifier: Apache-2.0
"""A plan as a figure: memory by part against the GPU's line, and step time against memory for every combination.

Needs matplotlib (extra `plot`), imported when a figure is drawn. SVG and HTML follow the reader's light or dark
theme, because text and axes take the page's colour; PNG has a white ground. The same plan gives the same bytes.

In SVG and HTML each bar and each point of the frontier has its value as a title, which a browser shows under the
pointer. A narrow page stacks its two drawings, and a line below shows a tapped value.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skill_tools.bundle import to_install
from skill_tools.errors import UnusableInput
from skill_tools.planning.accounts import Kind
from skill_tools.planning.search.options import HOST_MEMORY, PINNED_MEMORY, Budget, Option
from skill_tools.planning.search.planner import Plan, shown
from skill_tools.reports import plan_answer
from skill_tools.units import GIB

_FRONTIER_STEPS = 16
_PLACES = 80  # that a drawing tells apart each way
_NARROW_INCHES = 8
_LIMIT = "#e45756"
_RATIO_COLUMN = 1.03
SUFFIXES = (".svg", ".png", ".html")
_INK = "#010203"  # stands for the page's text colour until the figure is written
_PARTS = (  # name, kinds of lines that belong to it, colour (readable on light and dark grounds)
    (
        "weights",
        {Kind.WEIGHTS, Kind.FROZEN_WEIGHTS, Kind.IDLE_WEIGHTS, Kind.VISITING_WEIGHTS},
        "#4c78a8",
    ),
    ("gradients", {Kind.GRADIENTS, Kind.OTHER_GRADIENTS}, "#72b7b2"),
    ("optimizer", {Kind.MASTERS, Kind.MOMENTS, Kind.OTHER_STATES}, "#f58518"),
    ("activations", {Kind.ACTIVATIONS, Kind.LAYER_WORK}, "#54a24b"),
    ("logits and loss", {Kind.LOSS}, "#b279a2"),
    ("reserve", {Kind.WORKSPACE, Kind.RESERVE}, "#9d9da1"),
)
# On a phone the drawings stand one below the other, and letters are those of the page.
_PAGE = (
    "body{font:16px system-ui,sans-serif;margin:1rem;color:#24292f;background:#fff}h1{font-size:1.1rem}"
    "main{display:flex;flex-wrap:wrap;align-items:flex-start;gap:1rem}"
    "main svg{flex:1 1 340px;min-width:0;max-width:100%;height:auto}"
    "p{position:sticky;bottom:0;margin:0;padding:.6rem 0;background:inherit}[id*=value]{cursor:pointer}"
    "@media(prefers-color-scheme:dark){body{color:#d0d7de;background:#0d1117}p{background:#0d1117}}"
)
_TAPS = (
    "addEventListener('click',e=>{const g=e.target.closest('[id*=value]');"
    "if(g)document.querySelector('p').textContent=g.querySelector('title').textContent})"
)
_THEME = "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d0d7de}}"


def write(plan: Plan, path: str, *, may_overwrite: bool = False) -> None:
    """Draw `plan` into `path`.

    Raises `UnusableInput` for another suffix, no matplotlib, no right to write, and for an existing file or link,
    unless it `may_overwrite` that.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise UnusableInput(
            f"--plot {path!r}",
            expected=f"a file that ends in {', '.join(SUFFIXES)}",
            attempt="--plot plan.svg",
        )
    try:
        import matplotlib
    except ImportError:
        raise UnusableInput(
            "matplotlib is not installed",
            expected="the extra `plot`",
            attempt=to_install("plot"),
        ) from None
    matplotlib.use("Agg")
    ink = "#24292f" if target.suffix == ".png" else _INK
    with matplotlib.rc_context(_style(ink)):
        _save(_drawn(plan, ink, target.suffix), target, may_overwrite=may_overwrite)


def _style(ink: str) -> Any:
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(coloured, ink),
        "svg.fonttype": "none",
        "svg.hashsalt": "plan",
        "font.size": 9,
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "path.simplify": False,  # dots are lines of no length
    }


def _save(drawn: bytes, target: Path, *, may_overwrite: bool) -> None:
    try:
        with open(target, "wb" if may_overwrite else "xb") as file:
            file.write(drawn)
    except FileExistsError:
        raise UnusableInput(
            f"--plot {str(target)!r}: a file of that name is there",
            expected="a new name, or the word that it may be overwritten",
            attempt="--force, or another name",
        ) from None
    except OSError as error:
        raise UnusableInput(
            f"--plot {str(target)!r}: {error.strerror}",
            expected="a writable place",
            attempt="--plot plan.svg",
        ) from None


def _drawn(plan: Plan, ink: str, suffix: str) -> bytes:
    if suffix == ".html":
        return _page(plan, ink).encode()
    values: list[str] = []
    figure = _empty(plan, (11, _height(plan)))
    figure.suptitle(_title(plan), color=ink, fontsize=11)
    bars, frontier_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, plan, ink, values)
    _frontier(frontier_axes, plan, ink, values)
    if suffix == ".svg":
        return _themed(figure, values).encode()
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=160, facecolor="white")
    return buffer.getvalue()


def _height(plan: Plan) -> float:
    lines = sum(_wrapped(option.candidate.label).count("\n") + 2 for option in shown(plan))
    return max(4.6, 2.0 + 0.2 * lines)


def _empty(plan: Plan, size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def _page(plan: Plan, ink: str) -> str:
    """Return a page with two drawings, each at most as wide as the screen."""
    from html import escape

    drawings = []
    for draw, size in ((_bars, (5.6, _height(plan))), (_frontier, (5.0, 4.6))):
        values: list[str] = []
        figure = _empty(plan, size)
        draw(figure.subplots(), plan, ink, values)
        svg = _themed(figure, values)
        # Two drawings in one page: no identifier of one may be another's.
        prefix = draw.__name__.strip("_")
        svg = svg[svg.index("<svg") :].replace('id="', f'id="{prefix}-').replace('="#', f'="#{prefix}-')
        drawings.append(svg.replace("url(#", f"url(#{prefix}-"))
    title = escape(_title(plan))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Offload plan: {title}</title><style>{_PAGE}</style>"
        f"<body><h1>{title}</h1><main>{''.join(drawings)}</main>"
        '<p role="status">Point at a bar or a point, or tap it.</p>'
        f"<script>{_TAPS}</script></body></html>\n"
    )


def _title(plan: Plan) -> str:
    run = plan.run
    return (
        f"{run.shape.name} on {plan_answer.gpus(plan)}, {run.seq_length} tokens x micro-batch "
        f"{run.micro_batch}"
    )


def _valued(artist: Any, text: str, values: list[str]) -> None:
    """Give a drawn thing a value, which `_themed` writes into it as its title."""
    artist.set_gid(f"value-{len(values)}")
    values.append(text)


def _bars(axes: Any, plan: Plan, ink: str, values: list[str]) -> None:
    compared: Sequence[Option] = shown(plan)
    labels = [_wrapped(option.candidate.label) for option in compared]
    left = [0.0] * len(compared)
    for name, kinds, colour in _PARTS:
        widths = [
            sum(line.bytes for line in option.memory.gpu if line.kind in kinds) / GIB for option in compared
        ]
        if any(widths):
            drawn = axes.barh(labels, widths, left=left, color=colour, label=name, height=0.7)
            for bar, width, option in zip(drawn, widths, compared, strict=True):
                if not width:
                    bar.remove()
                    continue
                _valued(bar, f"{option.candidate.label}: {name} {width:.2f} GiB", values)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    budget = plan.budget.gpu_bytes / GIB
    _budget_lines(axes, plan)
    axes.annotate(
        f"{budget:.1f} GiB",
        (budget, 1.0),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="bottom",
        color=_LIMIT,
    )
    # The ratios stand in a column right of every bar and of the budget's line, so that none collides.
    column = _RATIO_COLUMN * max(*left, budget)
    for position, option in enumerate(compared):
        ratio = option.time.total_s / plan.without_offload.time.total_s
        axes.annotate(f"{ratio:.2f}x", (column, position), va="center", color=ink)
    axes.set_xlim(0, 1.1 * column)
    axes.invert_yaxis()
    is_narrow = axes.figure.get_figwidth() < _NARROW_INCHES
    axes.set_xlabel(
        "GiB on the most loaded GPU; on the right the"
        + ("\n" if is_narrow else " ")
        + "step time, over that without offload",
        **({"ha": "right", "x": 1.0} if is_narrow else {}),
    )
    place = {"ncols": 2, "loc": "upper right", "bbox_to_anchor": (1.0, -0.12)}
    if not is_narrow:
        place = {"ncols": 3, "loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axes.legend(frameon=False, labelcolor=ink, **place)
    _plain(axes)


def _frontier(axes: Any, plan: Plan, ink: str, values: list[str]) -> None:
    evaluated = points(plan)
    _dots(axes, _told_apart(evaluated), "#9d9da1", "legal combinations")
    axes.plot(*zip(*frontier(evaluated), strict=True), color="#4c78a8", linewidth=1.5, label="frontier")
    for memory_gib, step_s in _told_apart(frontier(evaluated)):
        (mark,) = axes.plot([memory_gib], [step_s], marker="o", markersize=4, color="#4c78a8")
        _valued(mark, f"frontier: {memory_gib:.1f} GiB a GPU, {step_s:.2f} s a step", values)
    if plan.recommendation is not None:
        best = (plan.recommendation.memory.device_bytes / GIB, plan.recommendation.time.total_s)
        star = axes.scatter(
            [best[0]], [best[1]], s=90, marker="*", color="#f58518", label="recommended", zorder=3
        )
        _valued(star, f"recommended: {best[0]:.1f} GiB a GPU, {best[1]:.2f} s a step", values)
    _budget_lines(axes, plan)
    axes.set_xlabel(f"GiB a GPU (solid: its memory, dashed: {plan.budget.headroom:.0%} less)")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=ink)
    _plain(axes)


def _dots(axes: Any, places: Sequence[tuple[float, float]], colour: str, label: str) -> None:
    """Draw a round dot at each place as one path, which takes a fifth of as many marks."""
    # Agg draws no line without length; nobody sees this one.
    length = 1e-6 * (max(x for x, _ in places) or 1)
    across = [number for x, _ in places for number in (x, x + length, math.nan)]
    up = [number for _, y in places for number in (y, y, math.nan)]
    axes.plot(across, up, color=colour, linewidth=2.8, solid_capstyle="round")
    axes.scatter([], [], s=8, color=colour, label=label)


def points(plan: Plan) -> list[tuple[float, float]]:
    """Return GiB a GPU and seconds a step of every legal combination that this host has the memory for."""
    evaluated = (option for budget in _budgets(plan) for option in plan.search.options(budget))
    return [
        (option.memory.device_bytes / GIB, option.time.total_s)
        for option in evaluated
        if option.limit not in {HOST_MEMORY, PINNED_MEMORY}
    ]


def _told_apart(evaluated: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return one point of those that would be drawn over each other: a drawing has 80 places each way."""
    spans = [(max(each) - min(each)) / _PLACES or 1 for each in zip(*evaluated, strict=True)]
    found = {(round(x / spans[0]), round(y / spans[1])): (x, y) for x, y in evaluated}
    return list(found.values())


def _budget_lines(axes: Any, plan: Plan) -> None:
    axes.axvline(plan.budget.gpu_bytes / GIB, color=_LIMIT, linewidth=1.5)
    axes.axvline(plan.budget.most_gpu_bytes / GIB, color=_LIMIT, linewidth=1, linestyle="--")


def _budgets(plan: Plan) -> list[Budget]:
    """Return budgets from the floor to the run's memory without offload, and the user's own."""
    low, high = plan.floor.memory.device_bytes, plan.without_offload.memory.device_bytes
    between = [low + (high - low) * step // _FRONTIER_STEPS for step in range(_FRONTIER_STEPS + 1)]
    return [plan.budget._replace(gpu_bytes=gpu_bytes) for gpu_bytes in (*between, plan.budget.gpu_bytes)]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both memory and time, by memory."""
    best: list[tuple[float, float]] = []
    for memory, seconds in sorted(points):
        if not best or seconds < best[-1][1]:
            best.append((memory, seconds))
    return best


def _plain(axes: Any) -> None:
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(label: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(label, 38))


def _themed(figure: Any, values: Sequence[str]) -> str:
    """Return a figure as SVG in the reader's theme, with a title in each element with a value."""
    import io
    from html import escape

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = (
        buffer.getvalue().replace(_INK, "currentColor").replace("<defs>", f"<style>{_THEME}</style><defs>", 1)
    )
    svg = re.sub(r"(\d\.\d)\d+(?=[^<>]*>)", r"\1", svg)  # below a tenth of a point nobody sees a place
    svg = re.sub(r">\s+<", ">\n<", svg)
    svg = re.sub(r"\s*\n(?!<)\s*", " ", svg)
    for number, text in enumerate(values):
        svg = svg.replace(
            f'<g id="value-{number}">', f'<g id="value-{number}"><title>{escape(text)}</title>', 1
        )
    return svg
