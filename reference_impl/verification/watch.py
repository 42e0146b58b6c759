"""Watches the first steps under a plan: their true peak and time beside what the plan has predicted.

It changes nothing. `reference_impl.fit` tries a plan before training and corrects it. Explained in docs/fitting.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from reference_impl.device import Device
from reference_impl.memory.ledger import mark_peak, marked_peak_bytes

_LOG = logging.getLogger(__name__)

STEPS = 4
# Of the prediction; beyond it a plan is wrong for this model.
_MOST_ERROR = 0.06


class StepWatch:
    """Reads peak and time after each of the first `STEPS` steps of `optimizer`, and then says in one line what it saw.

    `plan` is a planner's document; of one without a recommendation there is nothing to compare with. On the CPU twin
    peaks are those of an open ledger. `summary` is None until then.
    """

    def __init__(self, optimizer: Any, device: Device, plan: Mapping[str, Any]) -> None:
        self._device = device
        self._option: Mapping[str, Any] | None = (plan.get("recommendation") or {}).get("option")
        self._budget_bytes: int | None = (plan.get("budget") or {}).get("gpu_bytes")
        self._peaks: list[int] = []
        self._times = [time.perf_counter()]
        self.summary: str | None = None
        mark_peak(device)
        # What only has a step() of its own is not watched.
        is_hooked = isinstance(optimizer, torch.optim.Optimizer)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step()) if is_hooked else None

    def close(self) -> None:
        """Stop watching. Calling it again does nothing."""
        if self._hook is not None:
            self._hook.remove()

    def _after_step(self) -> None:
        peak_bytes = marked_peak_bytes(self._device)
        self._times.append(time.perf_counter())
        if peak_bytes is not None:
            self._peaks.append(peak_bytes)
        if len(self._times) <= STEPS:
            return
        self.close()
        if self._peaks and self._option is not None:
            self._say(max(self._peaks), self._times[-1] - self._times[-2], self._option)

    def _say(self, peak_bytes: int, step_s: float, option: Mapping[str, Any]) -> None:
        predicted: int = option["memory"]["allocated_bytes"]
        span = option["time"]
        seconds = f"{span.get('least_s', span['step_s']):.3g} to {span.get('most_s', span['step_s']):.3g} s"
        self.summary = (
            f"plan: {option['label']}: {peak_bytes / 2**30:.2f} GiB at the peak, {predicted / 2**30:.2f} predicted; "
            f"{step_s:.3f} s a step, {seconds} predicted"
        )
        is_over = self._budget_bytes is not None and peak_bytes > self._budget_bytes
        if is_over or peak_bytes > (1 + _MOST_ERROR) * predicted:
            _LOG.warning(
                "%s; try reference_impl.fit(model, optimizer, batch, plan=...), which corrects it",
                self.summary,
            )
        else:
            _LOG.info(self.summary)
