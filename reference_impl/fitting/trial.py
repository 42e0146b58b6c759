"""Runs and measures some steps under one plan; running out of memory is a result, not an error.

Explained in docs/fitting.md.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reference_impl.activations.budget import BudgetError
from reference_impl.device import Device
from reference_impl.device.base import device_is_full
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.apply import AppliedPlan, apply_plan

STEPS = 2
# The budget engine offloads everything in its first step, and decides by what that has shown.
_LEARNING_STEPS = 1
_SHORT = (RuntimeError, MemoryError, BudgetError)
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What steps under a plan took. `short_of` is empty, or what had too little room: device, host or pinned.

    `step_s` is the last step's, whose update hides behind nothing that follows; `retried` says that the allocator had
    to give its cache back in it.
    """

    steps: int
    peak_device_bytes: int
    peak_host_bytes: int
    step_s: float
    retried: bool = False
    short_of: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: `loss(model, batch)` with an AdamW whose gradients are clipped to `max_grad_norm`, or not."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    loss: Loss
    max_grad_norm: float | None
    device: Device

    def apply(self, plan: dict[str, Any]) -> AppliedPlan:
        """Put `plan` on the model."""
        return apply_plan(self.model, self.optimizer, plan, max_grad_norm=self.max_grad_norm)

    def step(self, applied: AppliedPlan) -> None:
        """Train one step on the batch."""
        self.loss(self.model, self.batch).backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Return what is on the device before anything is applied."""
        leaves = torch.utils._pytree.tree_leaves(self.batch)
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)),
        ]


def learns(plan: dict[str, Any]) -> bool:
    """Whether the plan has a budget of activations, whose engine decides by what the first steps show."""
    return (plan["execute"].get("activations") or {}).get("mode") == "budget"


def run(task: Task, plan: dict[str, Any], *, limit_bytes: int) -> Trial:
    """Train `STEPS` steps under `plan` in at most `limit_bytes` of the device; one more where a budget learns.

    Weights, states and random generators are other ones afterwards.
    """
    device = task.device
    if device.allocator is not None:
        device.allocator.free_bytes()
    steps, step_s, retried, short_of = 0, 0.0, False, ""
    ledger = Ledger(device, track=task.tensors(), limit_bytes=limit_bytes)
    try:
        with ledger, _closed_behind(task.apply(plan)) as applied:
            try:
                for _ in range(STEPS + (_LEARNING_STEPS if learns(plan) else 0)):
                    retries, start = _retries(device), time.perf_counter()
                    task.step(applied)
                    device.record().synchronize()
                    step_s, retried = time.perf_counter() - start, _retries(device) > retries
                    steps += 1
            except _SHORT as error:
                short_of = _short_of(error)
                if not short_of:
                    raise
                # What the step's frames hold has to go before the plan can be taken off: weights may come back.
                traceback.clear_frames(error.__traceback__)
    except _SHORT as error:
        short_of = _short_of(error)
        if not short_of:
            raise
    return Trial(
        steps=steps,
        peak_device_bytes=ledger.peak_device_bytes,
        peak_host_bytes=ledger.peak_host_bytes,
        step_s=step_s,
        retried=retried,
        short_of=short_of,
    )


@contextmanager
def _closed_behind(applied: AppliedPlan) -> Iterator[AppliedPlan]:
    """Take the plan off at the end; what a step that had no room has left unfinished is not wanted."""
    try:
        yield applied
    finally:
        try:
            applied.close()
        except _SHORT as error:
            if not _short_of(error):
                raise


def _short_of(error: BaseException) -> str:
    """Return what had no room, or nothing for another error."""
    if isinstance(error, BudgetError) or device_is_full(error):
        return "device"
    if "cudaHostRegister" in str(error):
        return "pinned"
    return "host" if isinstance(error, MemoryError) else ""


def _retries(device: Device) -> int:
    return 0 if device.allocator is None else device.allocator.retries
