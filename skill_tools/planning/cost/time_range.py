# SPDX-License-Identifier: Apache-2.0
"""The range of a step's time: the same prediction for the slowest and the fastest possible machine.

For an unnamed GPU it is over all possible cards. A machine known by name leaves the link, the host and the load on the
host unknown. A probed machine is known as closely as a step repeats from run to run. The possible error of each rate is
a fact in `hardware.yaml`.
"""

from typing import NamedTuple

from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.planning.cost import compute, step_time
from skill_tools.planning.cost.machine import Machine, known, model_constants
from skill_tools.planning.model.memory import Memory


class TimeRange(NamedTuple):
    """Seconds a step, at least and at most."""

    least_s: float
    most_s: float


def step_range(
    run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, *, measured_step_s: float | None = None
) -> TimeRange:
    """Return the range of a step of `run` under `mode` on `machine`; forward and backward may have been measured."""
    ranks = run.layout.ranks_on_node
    meant = [known(name, ranks_on_node=ranks) for name in machine.stands_for] or [machine]
    times = [
        _total_s(run, mode, memory, end, measured_step_s)
        for each in meant
        for end in (slowest(run, each), fastest(run, each))
    ]
    return TimeRange(min(times), max(times))


def _total_s(
    run: TrainingRun, mode: Mode, memory: Memory, machine: Machine, measured_step_s: float | None
) -> float:
    speed = compute.pace(run, machine, memory.parameters.shard, measured_step_s=measured_step_s)
    return step_time.estimate(run, mode, memory, machine, speed).total_s


def slowest(run: TrainingRun, machine: Machine) -> Machine:
    """Return the machine if all its rates are at the low end."""
    constants = model_constants()
    of_host = {"launch_s": constants["launch_slow_s"], "budget_extra": constants["budget_extra_slow"]}
    if machine.launch_s:
        of_host["launch_s"] = machine.launch_s * constants["range_launch"]
    if machine.measured:
        each = 1 / constants["range_probed"]
        return _scaled(machine, compute=each, link=each, host=each, **of_host)
    compute_s = constants["range_traced" if run.traced else "range_by_formula"]
    host = min(1 / constants["host_share"], 1 / constants["range_host"])
    link = constants["range_link_shared" if run.layout.ranks_on_node > 1 else "range_link"]
    return _scaled(machine, compute=1 / compute_s, link=1 / link, host=host, **of_host)


def fastest(run: TrainingRun, machine: Machine) -> Machine:
    """Return the machine if all its rates are at the high end."""
    constants = model_constants()
    of_host = {"launch_s": constants["launch_fast_s"], "budget_extra": constants["budget_extra_fast"]}
    if machine.launch_s:
        of_host["launch_s"] = machine.launch_s / constants["range_launch"]
    if machine.measured:
        each = constants["range_probed"]
        return _scaled(machine, compute=each, link=each, host=each, **of_host)
    compute_s, host = constants["range_traced"], constants["range_host"]
    link = constants["range_link_fast"]
    return _scaled(machine, compute=compute_s, link=link, host=host, **of_host)


def _scaled(
    machine: Machine, *, compute: float, link: float, host: float, launch_s: float, budget_extra: float
) -> Machine:
    return machine._replace(
        launch_s=launch_s,
        budget_extra=budget_extra,
        gemm=machine.gemm * compute,
        hbm=machine.hbm * compute,
        h2d_copy=machine.h2d_copy * link,
        d2h_copy=machine.d2h_copy * link,
        duplex_copy=machine.duplex_copy * link,
        update_link=machine.update_link * link,
        peers=machine.peers * link,
        network=machine.network * link,
        dram=machine.dram * host,
        cpu_adam=machine.cpu_adam * host,
        cpu_adam_per_tensor=machine.cpu_adam_per_tensor * host,
        update_dram=machine.update_dram * host,
        staged_copy=machine.staged_copy * host,
        update_cpu=machine.update_cpu * host,
        hybrid=None if machine.hybrid is None else machine.hybrid * host,
        hybrid_overlap=None if machine.hybrid_overlap is None else machine.hybrid_overlap * host,
    )
