# SPDX-License-Identifier: Apache-2.0
"""The search: every legal combination of a dialect's mechanisms, each with the least offload that fits a budget.

A combination that offloads the optimizer has one free number, the fraction. Less is always faster and needs less host
memory, so for each combination only the smallest hundredth that fits the GPU is considered.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.dialects.base import Dialect
from skill_tools.dialects.candidates import (
    DISTRIBUTED,
    OPTIMIZER,
    RECOMPUTE,
    Candidate,
    at_fraction,
    with_states,
)
from skill_tools.dialects.run import Mode, OptimizerEngine, TrainingRun
from skill_tools.planning.cost import optimizer, pageable, recompute, step_time, trained_layers
from skill_tools.planning.cost.compute import Pace
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.model import memory
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.model.streamed_states import element_bytes
from skill_tools.planning.search.legality import LEGAL, Judge, Legality, RuledOut
from skill_tools.planning.search.options import Budget, Option, limit_of, preference
from skill_tools.planning.search.restriction import EVERYTHING, Restriction

_STEPS = 100
_WORTH_PLACING = 0.99  # of a step: states elsewhere that shorten it less are not worth the room


class Forbidden(NamedTuple):
    """A mechanism that the rules rule out for this configuration."""

    candidate: Candidate
    reasons: tuple[RuledOut, ...]


class RunAdvice(NamedTuple):
    """Answers to this run's candidates about the machine and the rules (`dialects.candidates.Advice`)."""

    run: TrainingRun
    machine: Machine
    speed: Pace
    judged: Judge

    @property
    def best_streamed_share(self) -> float:
        """The share of the reference implementation's offloaded optimizer that is best streamed."""
        return optimizer.best_streamed_share(
            self.machine, self.run.streamed_states, weight_bytes=self.run.precision.weight_bytes
        )

    def recomputed_share(self, removed: float) -> float:
        """Return which share of the saved bytes its budget engine computes again when `removed` of them leave."""
        return recompute.recomputed_share(self.run, self.machine, self.speed, removed)

    def forbids(self, candidate: Candidate) -> bool:
        """Return whether the rules rule `candidate` out."""
        return not self.judged.of(candidate).legal

    def lacks(self, key: str) -> bool:
        """Return whether the run's releases are known, and do not have the canonical `key`."""
        return self.judged.lacks(key)


class Search:
    """Candidates of one configuration, judged once and then asked for any budget.

    A `judge` that another search has used knows its answers already. `left_out` names the mechanisms that the
    restriction has kept from the search.
    """

    def __init__(
        self,
        config: Config,
        dialect: Dialect,
        run: TrainingRun,
        machine: Machine,
        speed: Pace,
        *,
        versions: Mapping[str, str],
        restriction: Restriction = EVERYTHING,
        judge: Judge | None = None,
    ) -> None:
        self._dialect = dialect
        self._run, self._machine, self.speed = run, machine, speed
        self.judged = judge or Judge(config, versions)
        # From the start where no optimizer offload may divide states; beside it `_refilled` decides.
        self._places_states = not restriction.allows(OPTIMIZER)
        self._legal: list[tuple[Candidate, Legality]] = []
        self.ruled_out: list[Forbidden] = []
        self.left_out: set[str] = set()
        self.considered = 0
        self._memories: dict[Mode, Memory] = {}
        for candidate in dialect.candidates(config, run, RunAdvice(run, machine, speed, self.judged)):
            left_out = restriction.left_out(candidate, run)
            if left_out:
                self.left_out |= left_out
                continue
            self.considered += _STEPS if candidate.mode.optimizer_fraction else 1
            legality = self.judge(candidate)
            if legality.legal:
                self._legal.append((candidate, legality))
            elif (
                len(set(candidate.mechanisms) - {DISTRIBUTED}) == 1 and RECOMPUTE not in candidate.mechanisms
            ):
                self.ruled_out.append(Forbidden(candidate, legality.ruled_out))

    def _memory(self, mode: Mode) -> Memory:
        """Return the memory of `mode`, which no budget changes."""
        known = self._memories.get(mode)
        if known is None:
            known = self._memories[mode] = memory.estimate(self._run, mode)
        return known

    def judge(self, candidate: Candidate) -> Legality:
        """Return the rules' verdict; where there are no configuration files, there is no rule to break."""
        return self.judged.of(candidate) if self._dialect.has_files else LEGAL

    def judge_as_it_is(self, candidate: Candidate) -> Legality:
        """Return the rules' verdict on the configuration as it stands, which `candidate` is."""
        return self.judged.as_it_is(candidate) if self._dialect.has_files else LEGAL

    def evaluate(self, candidate: Candidate, legality: Legality, budget: Budget) -> Option:
        """Return the candidate as it is, with its memory and time."""
        return self._option(candidate, legality, self._memory(candidate.mode), budget)

    def options(self, budget: Budget) -> list[Option]:
        """Return every legal combination with the least offload that fits: fitting ones first, fastest first."""
        least = (self._least(candidate, legality, budget) for candidate, legality in self._legal)
        return sorted(self._refilled([option for option in least if option is not None], budget), key=_order)

    def fitting(self, budget: Budget) -> list[Option]:
        """Return those of `options` that fit, without timing the others."""
        least = (
            self._least(candidate, legality, budget)
            for candidate, legality in self._legal
            if self._within(candidate.mode, budget)
        )
        found = self._refilled([option for option in least if option is not None], budget)
        return sorted((option for option in found if option.fits), key=preference)

    def _within(self, mode: Mode, budget: Budget) -> bool:
        """Return whether `mode` keeps the GPU's budget, offloading all that it may."""
        return self._memory(mode).device_bytes <= budget.most_gpu_bytes

    def _option(self, candidate: Candidate, legality: Legality, found: Memory, budget: Budget) -> Option:
        found = pageable.within(found, candidate.mode, budget.pinned_bytes)
        step = step_time.estimate(self._run, candidate.mode, found, self._machine, self.speed)
        return Option(candidate, found, step, legality, limit_of(found, budget))

    def _least(self, candidate: Candidate, legality: Legality, budget: Budget) -> Option | None:
        """Return the candidate with the smallest fraction that fits, or with its own if none does.

        Nothing is returned if it fits without that offload: the combination without it is a candidate too.
        """
        found = self._memory(candidate.mode)
        if OPTIMIZER not in candidate.mechanisms:
            option = self._option(candidate, legality, found, budget)
            return self._placed(option, budget) if self._places_states else option
        without = candidate.mode._replace(optimizer_fraction=0.0, streamed_fraction=0.0)
        if self._within(without, budget):
            return None
        if candidate.mode.optimizer_engine is OptimizerEngine.CPU_ADAM:
            # DeepSpeed's share stays as it is.
            return self._option(candidate, legality, found, budget)
        partial = self.judge(at_fraction(candidate, 1 / _STEPS))
        if found.device_bytes > budget.most_gpu_bytes or not partial.legal:
            return self._option(candidate, legality, found, budget)
        least, enough = self._smallest_fraction(candidate, found, budget)
        return self._option(least, partial if least is not candidate else legality, enough, budget)

    def _refilled(self, found: list[Option], budget: Budget) -> list[Option]:
        """Return `found`, with states placed if streamed layers are the best option that fits, or nothing fits.

        The GPU may have room for states that the host has not. Without streamed layers optimizer offload is simpler,
        and about as fast.
        """
        best = min((option for option in found if option.fits), key=preference, default=None)
        if best is not None and not best.candidate.mode.trained_layers:
            return found
        return [self._placed(option, budget) for option in found]

    def _placed(self, option: Option, budget: Budget) -> Option:
        """Return trained layers with their states placed for the fastest update, if that gains something.

        Without room on the host they are placed for the least of it.
        """
        mode = option.candidate.mode
        streams = mode.trained_layers and not self._run.is_fully_sharded
        if not streams or mode.states_streamed < 1 or option.memory.device_bytes > budget.most_gpu_bytes:
            return option
        shares = {0.0}
        if not mode.updates_in_backward:
            shares.add(trained_layers.best_cpu_share(self._run, mode.streamed_states, self._machine))
        filled = [self._filled(option, share, budget) for share in shares]
        best = min(filled, key=_order)
        if not (best.fits or option.fits):  # states on the GPU are the least that the host lacks
            return min(option, *filled, key=lambda each: each.memory.host_bytes_per_node)
        gains = best.time.total_s <= _WORTH_PLACING * option.time.total_s
        return best if best.fits and (gains or not option.fits) else option

    def _filled(self, option: Option, cpu_share: float, budget: Budget) -> Option:
        """Return `option` with as many hundredths of states on the GPU as fit, and a share of the rest on the CPU."""
        states_bytes = element_bytes(self._run, option.candidate.mode.streamed_states)
        each_bytes = states_bytes * option.memory.parameters.total / _STEPS
        spare_bytes = budget.most_gpu_bytes - option.memory.device_bytes
        resident = min(int(spare_bytes / each_bytes), _STEPS) / _STEPS
        on_cpu = round(cpu_share * (1 - resident), 4)
        if not (resident or on_cpu):
            return option
        candidate = with_states(option.candidate, resident=resident, on_cpu=on_cpu)
        return self._option(candidate, option.legality, self._memory(candidate.mode), budget)

    def _smallest_fraction(
        self, candidate: Candidate, found: Memory, budget: Budget
    ) -> tuple[Candidate, Memory]:
        """Return the candidate with the smallest hundredth that fits; `found` is its fitting memory at 100 %."""
        low, high, best = 0, _STEPS, (candidate, found)
        step = self._guess(candidate, found, budget)
        while high - low > 1:
            tried = at_fraction(candidate, step / _STEPS)
            tried_memory = self._memory(tried.mode)
            if tried_memory.device_bytes <= budget.most_gpu_bytes:
                high, best = step, (tried, tried_memory)
                step -= 1
            else:
                low = step
                step += 1
            if not low < step < high:
                step = (low + high) // 2
        return best

    def _guess(self, candidate: Candidate, full: Memory, budget: Budget) -> int:
        """Interpolate where the fraction meets the budget: memory falls nearly in proportion to it."""
        least = self._memory(at_fraction(candidate, 1 / _STEPS).mode)
        fall = least.device_bytes - full.device_bytes
        if fall <= 0:
            return 1
        share = (least.device_bytes - budget.most_gpu_bytes) / fall
        return min(max(math.ceil(share * _STEPS), 1), _STEPS - 1)


def _order(option: Option) -> tuple[object, ...]:
    """Order options: fitting ones first, and of these the best."""
    return not option.fits, *preference(option)
