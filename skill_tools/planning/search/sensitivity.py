# SPDX-License-Identifier: Apache-2.0
"""Changes that change the answer: another budget, a longer sequence, a larger micro-batch, another loss, a slower link.

Another budget is searched again. For a longer sequence and a larger micro-batch the recommended mode is
evaluated again; for the link, the fitting options are timed again.
"""

from collections.abc import Callable, Sequence

from skill_tools.dialects.run import TrainingRun
from skill_tools.planning.cost import pageable, step_time
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import memory
from skill_tools.planning.search.candidates import Search
from skill_tools.planning.search.options import Budget, Option, limit_of
from skill_tools.units import gib

FUSED_LOSS = "a fused linear cross entropy"
_LITTLE = 0.98


def answers(
    run: TrainingRun,
    machine: Machine,
    search: Search,
    budget: Budget,
    options: Sequence[Option],
    how_to_fuse: Callable[[], str],
) -> tuple[tuple[str, str], ...]:
    """Return pairs of a change and its effect on the recommendation, the first of `options`.

    `how_to_fuse` names the setting that fuses head and loss in the run's framework.
    """
    best = options[0]
    found = [_other_budget(search, budget, factor, best) for factor in (0.9, 1.25)]
    found += [
        _larger("twice the sequence length", run._replace(seq_length=2 * run.seq_length), budget, best),
        _larger("twice the micro-batch", run._replace(micro_batch=2 * run.micro_batch), budget, best),
    ]
    if fused := with_fused_loss(run, best):
        effect = f"about {gib(fused)} a GPU in the recommended mode; its sums round otherwise"
        found.append((FUSED_LOSS, "; ".join(filter(None, (effect, how_to_fuse())))))
    if best.candidate.mechanisms:
        found.append(_slower_link(run, machine, search, [option for option in options if option.fits]))
    return tuple(found)


def with_fused_loss(run: TrainingRun, option: Option) -> int | None:
    """Return the GPU bytes of `option` with head and loss in one kernel, or None if that frees little."""
    if not run.is_eager or run.fused_loss:
        return None
    fused = memory.estimate(run._replace(fused_loss=True), option.candidate.mode).device_bytes
    return fused if fused < _LITTLE * option.memory.device_bytes else None


def _other_budget(search: Search, budget: Budget, factor: float, best: Option) -> tuple[str, str]:
    other = budget._replace(gpu_bytes=round(budget.gpu_bytes * factor))
    change = f"{gib(other.gpu_bytes)} a GPU"
    fastest = search.options(other)[0]
    if not fastest.fits:
        return change, "nothing legal fits"
    if fastest.candidate.mode == best.candidate.mode:
        return change, "the same answer"
    ratio = fastest.time.total_s / best.time.total_s
    return change, f"{fastest.candidate.label}, {ratio:.2f}x of the recommended step time"


def _larger(change: str, run: TrainingRun, budget: Budget, best: Option) -> tuple[str, str]:
    mode = best.candidate.mode
    found = pageable.within(memory.estimate(run, mode), mode, budget.pinned_bytes)
    limit = limit_of(found, budget)
    needs = f"{gib(found.device_bytes)} a GPU"
    return change, f"no longer fits the {limit}: {needs}; plan again" if limit else f"still fits: {needs}"


def _slower_link(
    run: TrainingRun, machine: Machine, search: Search, fitting: Sequence[Option]
) -> tuple[str, str]:
    best = fitting[0]
    slower = machine._replace(
        h2d_copy=machine.h2d_copy / 2,
        d2h_copy=machine.d2h_copy / 2,
        duplex_copy=machine.duplex_copy / 2,
        update_link=machine.update_link / 2,
    )

    def timed(option: Option) -> float:
        return step_time.estimate(run, option.candidate.mode, option.memory, slower, search.speed).total_s

    fastest = min(fitting, key=timed)
    change = "half the link rate"
    if fastest.candidate.mechanisms == best.candidate.mechanisms:
        return change, f"the same kind, {timed(best) / best.time.total_s:.2f}x of the recommended step time"
    return change, f"{fastest.candidate.label} becomes faster"
