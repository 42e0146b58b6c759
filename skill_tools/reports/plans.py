# SPDX-License-Identifier: Apache-2.0
"""A plan for people, as text or as Markdown for an issue: the answer (`plan_answer`), and on demand its details.

Where the model's shape is not known there is no plan; the card's decision table takes its place.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from skill_tools.dialects import registry
from skill_tools.dialects.candidates import RECOMPUTE
from skill_tools.planning.accounts import Kind
from skill_tools.planning.search.legality import Condition, RuledOut
from skill_tools.planning.search.options import Option, over
from skill_tools.planning.search.planner import Plan, shown
from skill_tools.planning.search.situations import Situation
from skill_tools.reports import plan_answer
from skill_tools.started import COMMAND, as_started
from skill_tools.units import gib, seconds


class _Row(Protocol):
    """How one row of the table is written; `head` is the first."""

    def __call__(self, cells: tuple[str, ...], widths: list[int], *, head: bool) -> str: ...


_KNOWN_RATES = "rates: {} of knowledge/hardware.yaml, not measured here; --profile FILE takes measured ones"
_NO_PLAN = "no plan was computed, because the model's shape is not known; the card answers by situation"
_ESTIMATED = (
    f"step times are a range because the rates of this setting are not measured; `{COMMAND} probe`, run once on "
    "the machine, narrows it, and so does --step-time with the time of a step without offload"
)
_PARKED = (
    Kind.WEIGHTS,
    Kind.FROZEN_WEIGHTS,
    Kind.IDLE_WEIGHTS,
    Kind.MASTERS,
    Kind.MOMENTS,
    Kind.OTHER_STATES,
)
_HEADER = ("", "GPU GiB", "host GiB/node", "step", "ratio", "")


def concise(plan: Plan, *, details: bool = False) -> str:
    """Return the plan as plain text."""
    blocks = plan_answer.lines(plan, code=_plain_code)
    if details:
        blocks += [*_simpler(plan, code=_plain_code), _table(plan, _plain_row)]
        blocks += _sections(plan, title="{}:", bullet="  ")
    return "\n".join(blocks)


def markdown(plan: Plan, *, details: bool = False) -> str:
    """Return the plan as Markdown."""
    head, *answer = plan_answer.lines(plan, code=_fenced_code)
    blocks = [f"### Plan: {head}\n", "\n\n".join(answer)]
    if details:
        blocks += ["", *_simpler(plan, code=_fenced_code), "", _table(plan, _markdown_row)]
        blocks += _sections(plan, title="\n**{}**\n", bullet="- ")
    return "\n".join(blocks)


def situations_concise(rows: Sequence[Situation]) -> str:
    """Return one block a row: its condition, its advice and the reason."""
    blocks = [f"{_NO_PLAN}:"]
    for row in rows:
        mark = " (applies here)" if row.applies else ""
        rule = f" [{row.rule}]" if row.rule else ""
        blocks.append(f"  {row.situation}{mark}\n    -> {as_started(row.recommend)}: {row.why}{rule}")
    return "\n".join(blocks)


def situations_markdown(rows: Sequence[Situation]) -> str:
    """Return a Markdown table."""
    head = f"{_NO_PLAN}.\n\n| Situation | Do | Why | Rule |\n|---|---|---|---|"
    return "\n".join(
        [
            head,
            *(f"| {row.situation} | {as_started(row.recommend)} | {row.why} | {row.rule} |" for row in rows),
        ]
    )


def _simpler(plan: Plan, *, code: plan_answer.Code) -> list[str]:
    """Return alternatives to the recommendation: our own offloader, and a change with fewer mechanisms."""
    best = plan.recommendation
    if best is None or plan.patch is None or not plan_answer.change(plan.patch):
        return []
    lines = []
    ours = plan_answer.carried_out_by_ours(plan)
    if ours and set(best.candidate.mechanisms) - {RECOMPUTE}:
        lines.append(ours)
    if plan.simpler is not None and plan.simpler_patch is not None:
        more = plan.simpler.time.total_s / best.time.total_s
        lines.append(f"simpler: {plan.simpler.candidate.label}, {more:.2f}x of that step time:")
        lines.append(code(plan_answer.change(plan.simpler_patch)))
    return lines


def _plain_code(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _fenced_code(text: str) -> str:
    return f"```\n{text}\n```"


ORDERS = {
    "gpu": lambda option: option.memory.device_bytes,
    "host": lambda option: (option.memory.host_bytes_per_node, option.memory.device_bytes),
    "time": lambda option: option.time.total_s,
}


def every(plan: Plan, order: str) -> str:
    """Return a table of all legal combinations, ordered by GPU memory (`gpu`), host memory (`host`) or `time`."""
    options = sorted([plan.as_it_is, *plan.search.options(plan.budget)], key=ORDERS[order])
    return f"{plan_answer.headline(plan)}\n{_table(plan, _plain_row, options)}"


def _table(plan: Plan, row: _Row, options: Sequence[Option] | None = None) -> str:
    rows = [_cells(option, plan) for option in (shown(plan) if options is None else options)]
    widths = [max(len(cells[column]) for cells in (_HEADER, *rows)) for column in range(len(_HEADER))]
    return "\n".join([row(_HEADER, widths, head=True), *(row(cells, widths, head=False) for cells in rows)])


def _cells(option: Option, plan: Plan) -> tuple[str, ...]:
    ratio = option.time.total_s / plan.without_offload.time.total_s
    notes = [
        _broken([each.rule for each in option.legality.ruled_out]),
        over(option, plan.budget),
        "" if option.time.calibrated else f"step {plan_answer.time_range(plan, option)}",
    ]
    return (
        option.candidate.label,
        f"{option.memory.device_bytes / (1 << 30):.1f}",
        f"{option.memory.host_bytes_per_node / (1 << 30):.1f}",
        seconds(option.time.total_s),
        f"{ratio:.2f}x",
        ", ".join(note for note in notes if note),
    )


def _broken(rules: list[str]) -> str:
    """Name the first of `rules`, and how many more there are."""
    more = f" +{len(rules) - 1} more" if len(rules) > 1 else ""
    return f"breaks {rules[0]}{more}" if rules else ""


def _plain_row(cells: tuple[str, ...], widths: list[int], *, head: bool) -> str:
    first = f"{cells[0]:<{widths[0]}}"
    numbers = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells[1:5], widths[1:5], strict=True))
    return f"  {first}  {numbers}  {cells[5]}".rstrip()


def _markdown_row(cells: tuple[str, ...], widths: list[int], *, head: bool) -> str:
    line = f"| {' | '.join(cells)} |"
    return f"{line}\n|---|---:|---:|---:|---:|---|" if head else line


def _sections(plan: Plan, *, title: str, bullet: str) -> list[str]:
    sections: list[tuple[str, list[str]]] = [
        ("ruled out", [f"{label}: {_reasons(reasons)}" for label, reasons in plan.ruled_out]),
    ]
    best = plan.recommendation
    if best is not None:
        sections.append(("watch", [f"{each.rule}: {each.reason}" for each in best.legality.watch]))
        sections.append(("to be sure, set", _open_keys(best.legality.conditions)))
        memory = [f"{line.name}: {gib(line.bytes)} = {line.formula}" for line in best.memory.gpu]
        sections.append((f"memory of one GPU on pipeline stage {best.memory.stage}", memory))
        sections.append(("time of one step", _times(best)))
        sections.append(("parked between two steps (docs/parking.md)", _parked(plan, best)))
    sections.append(
        ("changes that change the answer", [f"{change}: {answer}" for change, answer in plan.sensitivity])
    )
    rates = (
        f"rates measured: {plan.machine.source}"
        if plan.machine.measured
        else _KNOWN_RATES.format(", ".join(plan.machine.stands_for) or plan.machine.name)
    )
    assumptions = [f"shape: {plan.shape_source}", rates, *(each.text for each in plan.assumptions)]
    if not all(option.time.calibrated for option in shown(plan)):
        assumptions.append(_ESTIMATED)
    sections.append(("assumptions", assumptions))
    return [
        "\n".join([title.format(name), *(f"{bullet}{line}" for line in lines)])
        for name, lines in sections
        if lines
    ]


def _times(option: Option) -> list[str]:
    """One line for the compute and each cost: seconds that lengthen the step, and hidden seconds."""
    lines = [f"compute: {seconds(option.time.compute_s)}"]
    for cost in option.time.costs:
        hidden = cost.work_s - cost.exposed_s
        also = f", {seconds(hidden)} more hidden" if hidden > 0.0005 else ""
        lines.append(f"{cost.name}: {seconds(cost.exposed_s)}{also} = {cost.formula}")
    return lines


def _parked(plan: Plan, option: Option) -> list[str]:
    """Return the bytes that `park()` moves once gradients are gone; nothing if neither loop nor trainer supports it."""
    size_bytes = sum(line.bytes for line in option.memory.gpu if line.kind in _PARKED)
    takes_it = registry.named(plan.run.dialect).carry_out or plan_answer.carried_out_by_ours(plan)
    if not takes_it or not size_bytes:
        return []
    away_s, back_s = size_bytes / plan.machine.d2h_copy, size_bytes / plan.machine.h2d_copy
    gpu_bytes = plan.budget.gpu_bytes
    free_bytes = gpu_bytes - sum(line.bytes for line in option.memory.gpu if line.kind is Kind.RESERVE)
    parked, not_parked = (
        f"{gib(each)} ({max(each, 0) / gpu_bytes:.2f} of the GPU)"
        for each in (free_bytes, free_bytes - size_bytes)
    )
    return [
        f"{gib(size_bytes)} leave each GPU, and take as much pinned memory of the host",
        f"away in {seconds(away_s)}, back in {seconds(back_s)}, at the link's rates",
        f"an engine in this process has {parked} meanwhile, at most {not_parked} without parking (vLLM with its sleep "
        "mode: gpu_memory_utilization)",
    ]


def _open_keys(conditions: Iterable[Condition]) -> list[str]:
    """One line a key that nobody set: the rules it decides."""
    rules: dict[str, list[str]] = {}
    for each in conditions:
        rules.setdefault(each.missing[0], []).append(each.rule)
    return [f"{key}: decides {', '.join(names)}" for key, names in rules.items()]


def _reasons(reasons: Iterable[RuledOut]) -> str:
    return "; ".join(f"{each.rule} ({each.reason})" for each in reasons)
