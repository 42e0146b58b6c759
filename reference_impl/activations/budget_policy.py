# SPDX-License-Identifier: Apache-2.0
"""A budget in training: profile a step, plan, carry the plan out, and check that the peak stays within the budget.

The first two steps offload everything, and the second is profiled: during the first, host memory is being pinned, and
launches wait behind that. The plan is carried out from the third step on; the third is measured again for its
headroom. If a later step exceeds the budget, less is prefetched from then on. If this is not enough, a new plan is
made for less memory, by the missing bytes.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from reference_impl.activations.budget import BudgetError, BudgetPlan, StepProfile, plan_budget
from reference_impl.activations.geometry import Extent
from reference_impl.activations.headroom import Headroom, SegmentPeaks
from reference_impl.activations.policy import Decision
from reference_impl.activations.profile import StepProfiler
from reference_impl.activations.run import ForwardPass
from reference_impl.device import Device
from reference_impl.memory.ledger import device_bytes, mark_peak, marked_peak_bytes
from reference_impl.memory.rates import LinkSpeed

# A plan aims this share below the budget: CUDA's allocator rounds up as it happens to find blocks, differently in
# each step, by up to 1 MiB a block.
_MARGIN = 1 / 256

Budget = int | Literal["least"]


class BudgetPolicy:
    """Decides by a plan, as soon as there is one."""

    def __init__(
        self,
        headroom: Headroom,
        device: Device,
        measure_link: Callable[[int], LinkSpeed],
        *,
        budget_bytes: Budget | None,
        plan: BudgetPlan | None,
    ) -> None:
        """Take `plan`, or make one within `budget_bytes` from a profiled step ("least": the smallest)."""
        self._headroom = headroom
        self._device = device
        self._measure_link = measure_link
        self._budget_bytes = budget_bytes
        self._profiler: StepProfiler | None = None
        self._profile: StepProfile | None = None
        self._over_bytes = 0
        self._is_new = False
        self._is_shrunk = False
        self.plan = plan

    @property
    def needs_tape(self) -> bool:
        """Whether anything is, or may turn out to be, computed again."""
        return self._profiler is not None if self.plan is None else Decision.RECOMPUTE in self.plan.decisions

    def decide(self, run: ForwardPass, extent: Extent) -> Decision:
        """Return the plan's decision for the next storage of `run`; without one, or for another size, offload."""
        if self.plan is None or run.length >= len(self.plan.decisions):
            return Decision.OFFLOAD
        is_as_planned = self.plan.size_bytes[run.length] == extent.size_bytes
        return self.plan.decisions[run.length] if is_as_planned else Decision.OFFLOAD

    def start_run(self, run: ForwardPass) -> None:
        """Compare the last step's peak with the budget; without a plan, profile this step, or plan from the last one.

        Raises BudgetError for a budget below the bytes that must stay, ValueError without a count of device bytes.
        """
        if self.plan is not None:
            if self._budget_bytes is not None:
                self._check_peak(run)
            return
        if device_bytes(self._device) is None:
            raise ValueError(
                "budget_bytes needs someone who counts device bytes; expected a CUDA device, or an open Ledger on "
                "the CPU twin; try `with Ledger(device):` around the training loop"
            )
        peaks, profiler = self._headroom.learnt_peaks(), self._profiler
        if profiler is not None and peaks is not None and profiler.is_over and profiler.has_seen_backward:
            self._finish_profile(profiler, peaks, run)
        elif profiler is None and peaks is not None:
            self._check_least()
            self._begin_profile(run)
        elif profiler is not None and (profiler.is_over or profiler.is_broken):
            self._begin_profile(run)

    def _check_least(self) -> None:
        """Raise BudgetError if the first step took more: its times say nothing, but its memory does."""
        least_bytes = self._headroom.seen_peak_bytes() or 0
        if isinstance(self._budget_bytes, int) and self._budget_bytes < least_bytes:
            raise BudgetError(budget_bytes=self._budget_bytes, least_bytes=least_bytes)

    def _begin_profile(self, run: ForwardPass) -> None:
        self._profiler = run.observer = StepProfiler(run, self._device, self._headroom)
        self._headroom.measure_again(run, ceiling_bytes=None)

    def _finish_profile(self, profiler: StepProfiler, peaks: SegmentPeaks, run: ForwardPass) -> None:
        assert self._budget_bytes is not None
        self._profile = profiler.result(peaks, self._measure_link(profiler.largest_bytes))
        self._profiler = None
        if self._budget_bytes == "least":
            self._budget_bytes = int(self._profile.peak_bytes * (1 + 2 * _MARGIN))
        self._make_plan(run)

    def _check_peak(self, run: ForwardPass) -> None:
        """Answer a step above the budget: first with less prefetch, then with a new plan."""
        assert isinstance(self._budget_bytes, int)
        peaks = self._headroom.learnt_peaks()
        if peaks is None:
            return
        was_new, self._is_new = self._is_new, False
        peak_bytes = marked_peak_bytes(self._device) or 0
        if was_new:
            peak_bytes = max(need for needs in peaks.values() for need in needs)
        over_bytes = peak_bytes - self._budget_bytes
        if over_bytes > 0 and (was_new or self._is_shrunk) and self._profile is not None:
            self._over_bytes += over_bytes
            self._make_plan(run)
        elif over_bytes > 0:
            self._headroom.shrink(over_bytes)
            self._is_shrunk = True
        if over_bytes > 0 or was_new:
            mark_peak(self._device)

    def _make_plan(self, run: ForwardPass) -> None:
        assert self._profile is not None
        assert isinstance(self._budget_bytes, int)
        aim_bytes = int(self._budget_bytes * (1 - _MARGIN))
        least_bytes = self._profile.peak_bytes
        within_bytes = min(max(aim_bytes - self._over_bytes, least_bytes), self._budget_bytes)
        # The least was measured without recomputing, whose own memory is known only roughly.
        is_last_resort = self._over_bytes > 0 and within_bytes == least_bytes
        self.plan = plan_budget(self._profile, within_bytes, recomputing=not is_last_resort)
        self._is_new, self._is_shrunk = True, False
        self._headroom.measure_again(run, ceiling_bytes=max(aim_bytes, within_bytes))
