# SPDX-License-Identifier: Apache-2.0
"""Watches the first steps under a plan: their true peak and time beside the plan's predictions.

It changes nothing. `reference_impl.fit` tries a plan before training and corrects it. Explained in docs/fitting.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reference_impl.device import Device
from reference_impl.memory.ledger import mark_peak, marked_peak_bytes

_LOG = logging.getLogger(__name__)

STEPS = 4
# Of the prediction; beyond it a plan is wrong for this model.
_MOST_ERROR = 0.06


class StepWatch:
    """Reads peak and time after each of the first `STEPS` steps of `optimizer`, and then reports them in one line.

    `plan` is a planner's document; of one without a recommendation, or with other entries than the planner's, there is
    nothing to compare with. On the CPU twin peaks come from an open ledger. `summary` is None until then. `offload
    watch` reads `plan`.
    """

    def __init__(self, optimizer: Any, device: Device, plan: Mapping[str, Any]) -> None:
        self._device = device
        self.plan = plan
        self._predicted = _predicted(plan)
        self._peaks: list[int] = []
        self._times = [time.perf_counter()]
        self.summary: str | None = None
        mark_peak(device)
        # An object that only has a step() of its own is not watched.
        is_hooked = isinstance(optimizer, torch.optim.Optimizer)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step()) if is_hooked else None

    def close(self) -> None:
        """Stop watching. Calling it again does nothing."""
        if self._hook is not None:
            self._hook.remove()

    def _after_step(self) -> None:
        # The hook stays: torch walks the hooks while this runs.
        if len(self._times) > STEPS:
            return
        peak_bytes = marked_peak_bytes(self._device)
        self._times.append(time.perf_counter())
        if peak_bytes is not None:
            self._peaks.append(peak_bytes)
        if len(self._times) <= STEPS:
            return
        if self._peaks and self._predicted is not None:
            self._say(max(self._peaks), self._times[-1] - self._times[-2], self._predicted)

    def _say(self, peak_bytes: int, step_s: float, predicted: _Predicted) -> None:
        self.summary = (
            f"plan: {predicted.label}: {peak_bytes / 2**30:.2f} GiB at the peak, "
            f"{predicted.peak_bytes / 2**30:.2f} predicted; {step_s:.3f} s a step, "
            f"{predicted.least_s:.3g} to {predicted.most_s:.3g} s predicted"
        )
        is_over = predicted.budget_bytes is not None and peak_bytes > predicted.budget_bytes
        if is_over or peak_bytes > (1 + _MOST_ERROR) * predicted.peak_bytes:
            _LOG.warning(
                "%s; try reference_impl.fit(model, optimizer, batch, plan=...), which corrects it",
                self.summary,
            )
        else:
            _LOG.info(self.summary)


class _Predicted(NamedTuple):
    label: str
    peak_bytes: float
    least_s: float
    most_s: float
    budget_bytes: float | None


def _predicted(plan: Mapping[str, Any]) -> _Predicted | None:
    """Return the predictions of a planner's document, None for a document of other origin."""
    try:
        option, budget_bytes = plan["recommendation"]["option"], (plan.get("budget") or {}).get("gpu_bytes")
        span = option["time"]
        return _Predicted(
            label=str(option["label"]),
            peak_bytes=float(option["memory"]["allocated_bytes"]),
            least_s=float(span.get("least_s", span["step_s"])),
            most_s=float(span.get("most_s", span["step_s"])),
            budget_bytes=None if budget_bytes is None else float(budget_bytes),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
