# SPDX-License-Identifier: Apache-2.0
"""The next plan to try: a trial's measurement corrects the memory asked of the planner.

The planner is asked for less memory than the budget, by as much as its prediction was too low. So whatever it then
changes (split, activation budget or recomputation) is the fastest plan that it knows. At most two plans are tried to
their end. Explained in docs/fitting.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from offload_arithmetic.sizes import HEADROOM
from reference_impl.fitting import trial
from reference_impl.fitting.before import Before
from reference_impl.fitting.planner import Plan, Planner, RefusedPlanError
from reference_impl.fitting.progress import Say, silent
from reference_impl.fitting.trial import Task, Trial
from reference_impl.memory.shown import counted

_LOG = logging.getLogger(__name__)

# The share of the budget that a trial may not take: later steps cut the allocator's memory in other places.
# Llama-3-8B fitted 24 GiB in both steps of a trial, and a later one had 1.5 GiB in pieces, of which none held its
# logits.
TRIAL_MARGIN = 0.02
# Steps in all, unless none of the plans has fitted by then, or the only one that has takes far longer than it may.
MOST_STEPS = 4
_FAR_SLOWER = 1.5
_MOST_PLANS = 12
# After an attempt that had no room, the next one asks for less by this share of the budget.
_LESS = 0.08
# Room beside the headroom that is worth another plan, of the budget.
_UNUSED = 0.05
_RETRIED = (
    "; the allocator gives its cache back in every step, which takes time: try "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
# The last resort: a trial of it takes all steps, and it was the fastest way for none of seven models that fitted
# otherwise.
_BUDGET_ENGINE = "activation-budget"
# Two ways to divide states; a plan has one: the weights themselves leave, or they stay on the device. The first is the
# last resort for weights that are on the device; where they are on the host, the faster way is taken.
_TRAINED_LAYERS = "trained-layer-streaming"
_OPTIMIZER = "optimizer-offload"
_OTHER_WAY = {_TRAINED_LAYERS: _OPTIMIZER, _OPTIMIZER: _TRAINED_LAYERS}


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """The plan that was chosen, its trial, and the cost of the search."""

    plan: Plan
    trial: Trial
    steps: int
    plans: int

    def measured(self, budget_bytes: int) -> dict[str, Any]:
        """Return the plan's section `fitted`."""
        return {
            "gpu_budget_bytes": budget_bytes,
            "peak_device_bytes": self.trial.peak_device_bytes,
            "peak_host_bytes": self.trial.peak_host_bytes,
            "step_s": self.trial.step_s,
            "steps": self.steps,
            "plans": self.plans,
            "retried": self.trial.retried,
        }

    def summary(self, budget_bytes: int) -> str:
        """Return one line."""
        return (
            f"fit: {self.plan['recommendation']['option']['label']}: {self.trial.peak_device_bytes / 2**30:.2f} of "
            f"{budget_bytes / 2**30:.2f} GiB on the device, {self.trial.peak_host_bytes / 2**30:.2f} GiB on the host, "
            f"{self.trial.step_s:.3f} s a step; {counted(self.plans, 'plan')} in {counted(self.steps, 'step')}"
            + (_RETRIED if self.trial.retried else "")
            + "".join(f"; {reason}" for reason in self.plan["recommendation"].get("reasons", ()))
        )


class Search:
    """Tries plans for `task` until one is good, `first` before others, if there is one.

    The planner may be wrong by `error_share` of the budget; `other_bytes` of the budget are counted by no plan.
    """

    def __init__(
        self,
        task: Task,
        before: Before,
        planner: Planner,
        budget_bytes: int,
        *,
        other_bytes: int,
        error_share: float,
        first: Plan | None = None,
        say: Say = silent,
    ) -> None:
        self._say = say
        self._task, self._before, self._planner = task, before, planner
        self._budget_bytes = budget_bytes
        self._aim_bytes = round((1 - HEADROOM) * budget_bytes)
        self._planned_for_bytes = max(round((1 - error_share) * self._aim_bytes) - other_bytes, 1)
        self._without = frozenset({_BUDGET_ENGINE})
        # On the twin its engine needs an open ledger, which a user's training does not have.
        self._may_learn = task.device.allocator is not None
        streams = first is not None and trial.streams_trained_layers(first)
        self._way = _TRAINED_LAYERS if streams else _OPTIMIZER
        self._first = first
        self._good: list[tuple[Plan, Trial]] = []
        self._tried: list[Plan] = []
        # Whether layers could not be taken off the device, because it was full of their weights.
        self._is_full = False

    def find_best(self) -> ChosenPlan:
        """Return the best plan that was tried. Raises RefusedPlanError where none is left to try."""
        steps = plans = 0
        for _ in range(_MOST_PLANS):
            self._say("planning")
            try:
                plan, self._first = self._first or self._next(), None
            except RefusedPlanError:
                if not self._good:
                    if self._is_full:
                        raise self._no_room() from None
                    raise
                break
            if self._good and any(plan["execute"] == tried["execute"] for tried in self._tried):
                break
            self._tried.append(plan)
            found = self._try(plan, f"trial {plans + 1}, {plan['recommendation']['option']['label']}")
            _LOG.info("fit tried %s: %s", plan["recommendation"]["option"]["label"], found.said())
            steps, plans = steps + max(found.steps, 1), plans + 1
            if found.without_modules:
                # Its prediction is of another model.
                self._without |= found.without_modules
                continue
            if found.short_of:
                if self._good:
                    break
                self._ask_for_less(plan, found)
                continue
            self._good.append((plan, found))
            has_steps = steps + trial.STEPS <= MOST_STEPS or (
                len(self._good) == 1 and self._is_far_slower(plan, found)
            )
            if not has_steps or not self._ask_for_better(plan, found):
                break
        if not self._good:
            raise RefusedPlanError(
                f"{plans} plans had too little memory; expected one to fit; try a smaller batch"
            )
        plan, found = min(self._good, key=lambda good: self.preference(*good))
        return ChosenPlan(plan=plan, trial=found, steps=steps, plans=plans)

    def _next(self) -> Plan:
        try:
            plan = self._plan(self._way)
        except RefusedPlanError:
            if self._good or (self._way == _TRAINED_LAYERS and not self._compares_ways):
                raise
            # Streamed layers take less memory of the device, and more of the host.
            self._way = _OTHER_WAY[self._way]
            with suppress(RefusedPlanError):
                return self._plan(self._way)
            without = self._without - {_BUDGET_ENGINE} if self._may_learn else self._without
            self._may_learn = False
            # Its refusal gives the bytes that the way with the smaller need takes.
            return self._planner.plan(self._planned_for_bytes, without=without)
        if self._tried or not self._compares_ways:
            return plan
        with suppress(RefusedPlanError):
            other = self._plan(_OTHER_WAY[self._way])
            if _time(other)["step_s"] < _time(plan)["step_s"]:
                self._way = _OTHER_WAY[self._way]
                return other
        return plan

    def _plan(self, way: str) -> Plan:
        """Return the fastest plan that divides states so."""
        return self._planner.plan(self._planned_for_bytes, without=self._without | {_OTHER_WAY[way]})

    @property
    def _compares_ways(self) -> bool:
        """Whether the faster way is taken: weights of the host may stay there. Time is judged on an accelerator."""
        return self._task.on_host and self._task.device.is_accelerator

    def _try(self, plan: Plan, name: str) -> Trial:
        limit_bytes = round((1 - TRIAL_MARGIN) * self._budget_bytes)
        try:
            return trial.run(
                self._task, plan, limit_bytes=limit_bytes, say=lambda text: self._say(f"{name}: {text}")
            )
        finally:
            self._before.restore()

    def _ask_for_less(self, plan: Plan, found: Trial) -> None:
        """After an attempt without room: ask for less of the memory that it lacked, or for another mechanism."""
        match found.short_of:
            case "host":
                hosted = plan["recommendation"]["option"]["memory"]["host_bytes_per_node"]
                self._planner.host_bytes = round((1 - _LESS) * min(hosted, self._planner.host_bytes))
            case "pinned":
                pinned = plan["recommendation"]["option"]["memory"]["pinned_bytes_per_node"]
                self._planner.pinned_bytes = pinned // 2
            case _ if trial.learns(plan):
                # How far its engine comes, no plan knows before it has learnt the step; others are counted.
                self._may_learn = False
            case _ if self._way == _TRAINED_LAYERS and not (found.was_applied or self._task.on_host):
                raise self._no_room()
            case _:
                # Beside frozen layers that leave, all else may yet find room.
                self._is_full |= trial.streams_weights(plan) and not (found.was_applied or self._task.on_host)
                lacked = min(self._planned_for_bytes, _predicted(plan))
                self._planned_for_bytes = lacked - round(_LESS * self._budget_bytes)

    def _no_room(self) -> RefusedPlanError:
        return RefusedPlanError(
            "the model's weights leave no room on the device to stream them from; expected them on the host; "
            f"try the model on the CPU, and device={str(self._task.device.torch_device)!r}"
        )

    def _ask_for_better(self, plan: Plan, found: Trial) -> bool:
        """Ask for a plan of more memory if the budget has room, of less if not, for a rival, or none."""
        residual = found.peak_device_bytes - _predicted(plan)
        unused = self._aim_bytes - found.peak_device_bytes
        if found.retried or unused < 0:
            self._planned_for_bytes = (
                self._aim_bytes
                - max(residual, 0)
                - (round(_LESS * self._budget_bytes) if found.retried else 0)
            )
            return True
        if (
            unused > _UNUSED * self._budget_bytes
            and _moves_anything(plan)
            and not self._is_far_slower(plan, found)
        ):
            self._planned_for_bytes = self._aim_bytes - residual
            return True
        rival = self._rival(plan, found)
        if rival is None:
            return False
        self._way, self._without = rival
        return True

    def _is_far_slower(self, plan: Plan, found: Trial) -> bool:
        """Whether the plan's time is wrong here; it is judged on an accelerator alone."""
        return self._task.device.is_accelerator and found.step_s > _FAR_SLOWER * _time(plan)["most_s"]

    def _rival(self, plan: Plan, found: Trial) -> tuple[str, frozenset[str]] | None:
        """Return the way of the next best plan that may be faster, and the mechanisms to leave out; None without one.

        Time is judged on an accelerator alone.
        """
        if not self._task.device.is_accelerator or not _moves_anything(plan):
            return None
        if self._compares_ways:
            # The time of one way is wrong by much the same in all its plans, so that the other way tells more.
            other = _OTHER_WAY[self._way]
            with suppress(RefusedPlanError):
                if _time(self._plan(other))["least_s"] < found.step_s:
                    return other, self._without
        mechanisms = frozenset(plan["recommendation"]["option"]["mechanisms"])
        # A plan with all the mechanisms, and more, is no answer to leaving some out.
        faster = [
            (option["time"]["step_s"], self._without | others)
            for option in plan["alternatives"]
            if option["fits"]
            and option["time"]["least_s"] < found.step_s
            and (others := mechanisms - frozenset(option["mechanisms"]))
        ]
        return (self._way, min(faster, key=itemgetter(0))[1]) if faster else None

    def preference(self, plan: Plan, found: Trial) -> tuple[bool, float]:
        """Order by whether the headroom is kept, then by time: measured, or on the twin as predicted."""
        is_tight = found.retried or found.peak_device_bytes > self._aim_bytes
        on_device = self._task.device.is_accelerator
        return is_tight, found.step_s if on_device else _time(plan)["step_s"]


def fastest(searches: Sequence[Search]) -> tuple[int, ChosenPlan]:
    """Run all of them; return the number of the best, the plan that it has chosen, and the steps of all.

    Raises RefusedPlanError, the first one's, where none has a plan.
    """
    found: dict[int, ChosenPlan] = {}
    refused: list[RefusedPlanError] = []
    for index, search in enumerate(searches):
        try:
            found[index] = search.find_best()
        except RefusedPlanError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    best = min(found, key=lambda index: searches[index].preference(found[index].plan, found[index].trial))
    steps, plans = (sum(getattr(each, name) for each in found.values()) for name in ("steps", "plans"))
    return best, replace(found[best], steps=steps, plans=plans)


def _predicted(plan: Plan) -> int:
    found: int = plan["recommendation"]["option"]["memory"]["allocated_bytes"]
    return found


def _time(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = plan["recommendation"]["option"]["time"]
    return found


def _moves_anything(plan: Plan) -> bool:
    execute = plan["execute"]
    return bool(
        trial.streams_trained_layers(plan)
        or execute["optimizer"]["offload_fraction"]
        or execute.get("activations")
        or execute.get("weights")
    )
