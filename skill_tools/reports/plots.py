"""A plan as a figure: memory by part against the GPU's line, and step time against memory for every combination.

Needs matplotlib (extra `plot`), imported when a figure is drawn. SVG and HTML follow the reader's light or dark
theme, because text and axes take the page's colour; PNG has a white ground. The same plan gives the same bytes.
"""

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
_THEME = "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d0d7de}}"


def write(plan: Plan, path: str, *, may_overwrite: bool = False) -> None:
    """Draw `plan` into `path`.

    Raises `UnusableInput` for another suffix, no matplotlib, no right to write, and for a file or link that is there
    already, unless it `may_overwrite` that.
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
        _save(_figure(plan, ink), target, may_overwrite=may_overwrite)


def _style(ink: str) -> Any:
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {**dict.fromkeys(coloured, ink), "svg.fonttype": "none", "svg.hashsalt": "plan", "font.size": 9}


def _save(figure: Any, target: Path, *, may_overwrite: bool) -> None:
    drawn = _drawn(figure, target.suffix)
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


def _drawn(figure: Any, suffix: str) -> bytes:
    if suffix != ".png":
        return _themed(figure, page=suffix == ".html").encode()
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=160, facecolor="white")
    return buffer.getvalue()


def _figure(plan: Plan, ink: str) -> Any:
    from matplotlib.figure import Figure

    compared = shown(plan)
    lines = sum(_wrapped(option.candidate.label).count("\n") + 2 for option in compared)
    figure = Figure(figsize=(11, max(4.6, 2.0 + 0.2 * lines)), layout="constrained")
    figure.patch.set_alpha(0)
    figure.suptitle(_title(plan), color=ink, fontsize=11)
    bars, frontier_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, plan, compared, ink)
    _frontier(frontier_axes, plan, ink)
    return figure


def _title(plan: Plan) -> str:
    run = plan.run
    return (
        f"{run.shape.name} on {plan_answer.gpus(plan)}, {run.seq_length} tokens x micro-batch "
        f"{run.micro_batch}"
    )


def _bars(axes: Any, plan: Plan, compared: Sequence[Option], ink: str) -> None:
    labels = [_wrapped(option.candidate.label) for option in compared]
    left = [0.0] * len(compared)
    for name, kinds, colour in _PARTS:
        widths = [
            sum(line.bytes for line in option.memory.gpu if line.kind in kinds) / GIB for option in compared
        ]
        if any(widths):
            axes.barh(labels, widths, left=left, color=colour, label=name, height=0.7)
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
    axes.set_xlabel("GiB on the most loaded GPU; on the right the step time, over that without offload")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), labelcolor=ink)
    _plain(axes)


def _frontier(axes: Any, plan: Plan, ink: str) -> None:
    evaluated = points(plan)
    axes.scatter(*zip(*evaluated, strict=True), s=8, color="#9d9da1", label="legal combinations")
    axes.plot(*zip(*frontier(evaluated), strict=True), color="#4c78a8", linewidth=1.5, label="frontier")
    if plan.recommendation is not None:
        best = (plan.recommendation.memory.device_bytes / GIB, plan.recommendation.time.total_s)
        axes.scatter([best[0]], [best[1]], s=90, marker="*", color="#f58518", label="recommended", zorder=3)
    _budget_lines(axes, plan)
    axes.set_xlabel(f"GiB a GPU (solid: what it has, dashed: {plan.budget.headroom:.0%} less)")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=ink)
    _plain(axes)


def points(plan: Plan) -> list[tuple[float, float]]:
    """Return GiB a GPU and seconds a step of every legal combination that this host has the memory for."""
    evaluated = (option for budget in _budgets(plan) for option in plan.search.options(budget))
    return [
        (option.memory.device_bytes / GIB, option.time.total_s)
        for option in evaluated
        if option.limit not in {HOST_MEMORY, PINNED_MEMORY}
    ]


def _budget_lines(axes: Any, plan: Plan) -> None:
    axes.axvline(plan.budget.gpu_bytes / GIB, color=_LIMIT, linewidth=1.5)
    axes.axvline(plan.budget.most_gpu_bytes / GIB, color=_LIMIT, linewidth=1, linestyle="--")


def _budgets(plan: Plan) -> list[Budget]:
    """Return budgets from the floor to what the run takes without offload, and the user's own."""
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


def _themed(figure: Any, *, page: bool) -> str:
    import io

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = (
        buffer.getvalue().replace(_INK, "currentColor").replace("<defs>", f"<style>{_THEME}</style><defs>", 1)
    )
    if not page:
        return svg
    drawing = svg[svg.index("<svg") :]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f"<title>Offload plan</title><body>{drawing}</body></html>\n"
    )
