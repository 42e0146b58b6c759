# SPDX-License-Identifier: Apache-2.0
"""Runs and measures some steps under one plan; running out of memory is a result, not an error.

Explained in docs/fitting.md.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from reference_impl.activations.budget import BudgetError
from reference_impl.device import Device, PinningError
from reference_impl.device.base import device_is_full
from reference_impl.fitting.progress import Say, silent
from reference_impl.memory.closing import closed_behind
from reference_impl.memory.host import host_storages
from reference_impl.memory.ledger import Ledger, note_on_host
from reference_impl.memory.shown import size
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.step import WorkLostError
from reference_impl.sequences import HeadGroups, SequenceTiles
from reference_impl.verification.apply import AppliedPlan, Given, apply_plan, optimizers_in
from reference_impl.verification.trace import tensors_in
from reference_impl.verification.trace_ledger import allocated_bytes
from reference_impl.weights.storages import move

STEPS = 2
# The budget engine offloads everything in two steps, and decides in the third, which waits for each of its copies.
_LEARNING_STEPS = 2
_SHORT = (RuntimeError, MemoryError, BudgetError)
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The time and memory of steps under a plan. `short_of` names the memory that was too small: device, host, pinned.

    `was_applied` says that the plan itself had room. `step_s` is the last step's, with no later work to hide its
    update; `retried`: the allocator had to give its cache back in it. `without_modules` are the mechanisms of the plan
    for which the model has no module: nothing runs in tiles, or in groups of heads.
    """

    steps: int
    peak_device_bytes: int
    peak_host_bytes: int
    step_s: float
    retried: bool = False
    short_of: str = ""
    was_applied: bool = True
    without_modules: frozenset[str] = frozenset()

    def said(self) -> str:
        """Return one line."""
        if self.short_of:
            return f"too little {self.short_of} memory after {self.steps} whole steps"
        return f"{self.peak_device_bytes / 2**30:.2f} GiB on the device, {self.step_s:.3f} s a step"


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training to try: `loss(model, batch)` with AdamW, Muon or both; gradients are clipped to `max_grad_norm`.

    `on_host` says that the model's weights are on the host, and are to be there again in the end.
    """

    model: nn.Module
    optimizer: Given
    batch: Any
    loss: Loss
    max_grad_norm: float | None
    device: Device
    on_host: bool

    def place(self, plan: dict[str, Any]) -> None:
        """Move weights on the host to the place from which `plan` takes them."""
        if not self.on_host:
            return
        if streams_weights(plan):
            for tensor in self._tensors():
                note_on_host(tensor)
        else:
            move(self.model, self.device.torch_device)

    def put_back(self) -> None:
        """Have weights that were on the host there again; it may be called twice.

        Gradients go along; those that were offloaded have no values any more, and are dropped.
        """
        if self.on_host:
            # They may have other memory by now.
            host_storages.difference_update(each.untyped_storage().data_ptr() for each in self._tensors())
            _drop_stand_ins(self.model)
            move(self.model, torch.device("cpu"))

    @contextmanager
    def moved(self, plan: dict[str, Any]) -> Iterator[None]:
        """Move weights on the host to the place from which `plan` takes them; put them back in the end."""
        with closed_behind(self.put_back):
            self.place(plan)
            yield

    def apply(self, plan: dict[str, Any]) -> AppliedPlan:
        """Put `plan` on the model; the optimizers keep their states, for the next plan."""
        listed = optimizers_in(self.optimizer)
        states = [dict(each.state) for each in listed]
        # Its size of the model may come from a formula, whose error is known.
        its_own = {name: section for name, section in plan.items() if name != "model"}
        applied = apply_plan(
            self.model,
            self.optimizer,
            its_own,
            max_grad_norm=self.max_grad_norm,
            device=self.device.torch_device,
        )
        for each, before in zip(listed, states, strict=True):
            each.state.update(before)
        return applied

    def step(self, applied: AppliedPlan) -> None:
        """Train one step on the batch."""
        # A loss may take its labels out of the batch.
        batch = tree_map(lambda leaf: copy(leaf) if isinstance(leaf, MutableMapping) else leaf, self.batch)
        self.loss(self.model, batch).backward()
        applied.optimizer.step()
        applied.optimizer.zero_grad()

    def tensors(self, plan: dict[str, Any]) -> list[torch.Tensor]:
        """Return the bytes on the device before `plan` is applied."""
        if self.on_host and streams_weights(plan):
            return list(tensors_in(self.batch))
        return [*self._tensors(), *tensors_in(self.batch)]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def other_bytes(self) -> int:
        """Return the bytes that the device always holds beside the weights: buffers, the batch, tensors and workspaces.

        No plan counts it. The optimizer's states are on the host by now, and no gradients are left.
        """
        buffers = _storage_bytes(self.model.buffers())
        allocator = self.device.allocator
        if allocator is None:
            return buffers + _storage_bytes(tensors_in(self.batch))
        _take_workspaces(self.device)
        if self.on_host:
            return allocator.live_bytes + buffers
        return max(allocator.live_bytes - _storage_bytes(self.model.parameters()), 0)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the allocator takes for the storages of `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each._cdata: allocated_bytes(each.nbytes()) for each in storages}.values())


@torch.enable_grad()
def _take_workspaces(device: Device) -> None:
    """Multiply matrices in forward and backward: for each, cuBLAS takes memory that it keeps."""
    matrix = torch.ones(16, 16, device=device.torch_device, requires_grad=True)
    (matrix @ matrix).sum().backward()


def _drop_stand_ins(model: nn.Module) -> None:
    """Drop the stand-ins that a plan has left for offloaded gradients: they cannot be moved to another device."""
    for param in model.parameters():
        if isinstance(param.grad, GradientStandIn):
            param.grad = None


def learns(plan: dict[str, Any]) -> bool:
    """Whether the plan has a budget of activations, whose engine learns from the first steps."""
    return (plan["execute"].get("activations") or {}).get("mode") == "budget"


def streams_trained_layers(plan: dict[str, Any]) -> bool:
    """Whether the plan streams the weights that are trained, from wherever they are."""
    return "trained_layers" in plan["execute"]


def streams_weights(plan: dict[str, Any]) -> bool:
    """Whether the plan streams weights, trained or frozen, from wherever they are."""
    return streams_trained_layers(plan) or "weights" in plan["execute"]


def run(task: Task, plan: dict[str, Any], *, limit_bytes: int, say: Say = silent) -> Trial:
    """Train `STEPS` steps under `plan` in at most `limit_bytes` of the device; two more where a budget learns.

    `say` is told before each step. Weights, states and random generators are other ones afterwards.
    """
    device = task.device
    if device.allocator is not None:
        device.allocator.free_bytes()
    steps, peak_bytes, step_s, retried, short_of, was_applied = 0, 0, 0.0, False, "", False
    tiles = head_groups = None
    ledger = Ledger(device, track=task.tensors(plan), limit_bytes=limit_bytes)
    try:
        with ledger, task.moved(plan), _closed_behind(task.apply(plan), ledger) as applied:
            # Attaching and closing may take more memory than a step, within the limit; a plan counts steps alone.
            ledger.reset_peak()
            was_applied, tiles, head_groups = True, applied.tiles, applied.head_groups
            try:
                planned = STEPS + (_LEARNING_STEPS if learns(plan) else 0)
                for number in range(1, planned + 1):
                    peak = f", peak so far {size(ledger.peak_device_bytes)}" if steps else ""
                    say(f"step {number} of {planned}{peak}")
                    retries, start = _retries(device), time.perf_counter()
                    task.step(applied)
                    device.record().synchronize()
                    step_s, retried = time.perf_counter() - start, _retries(device) > retries
                    steps += 1
                peak_bytes = ledger.peak_device_bytes
            except _SHORT as error:
                short_of = _short_of(error)
                if not short_of:
                    raise
                # Tensors that the step's frames hold have to go before the plan can be taken off: weights may come
                # back.
                for each in (error, error.__cause__):
                    if each is not None:
                        traceback.clear_frames(each.__traceback__)
                        # A frame that is cleared has its function yet, and so a closure's values: the arguments of a
                        # module.
                        each.__traceback__ = None
                # Torch's CPU engine has the nodes of a failed backward until the next one, and they their weights.
                ledger.lift_limit()
                # An update that has begun in backward is missed there; weights that are not back, by `Before.restore`.
                with suppress(*_SHORT):
                    applied.close()
    except _SHORT as error:
        short_of = _short_of(error)
        if not short_of:
            raise
    return Trial(
        steps=steps,
        peak_device_bytes=peak_bytes,
        peak_host_bytes=ledger.peak_host_bytes,
        step_s=step_s,
        retried=retried,
        short_of=short_of,
        was_applied=was_applied,
        without_modules=_without_modules(tiles, head_groups),
    )


def _without_modules(tiles: SequenceTiles | None, head_groups: HeadGroups | None) -> frozenset[str]:
    """Return which of both has found no module in a step; sequences are long wherever they are planned."""
    found = {
        "sequence-tiles": tiles is None or tiles.reaches_blocks,
        "head-groups": head_groups is None or head_groups.modules_in_groups,
    }
    return frozenset(name for name, modules in found.items() if not modules)


@contextmanager
def _closed_behind(applied: AppliedPlan, ledger: Ledger) -> Iterator[AppliedPlan]:
    """Take the plan off at the end; the unfinished work of a step that had no room is dropped.

    If that has no room within the limit either, returning weights get all memory.
    """
    try:
        yield applied
    finally:
        try:
            applied.close()
        except _SHORT as error:
            if not _short_of(error):
                raise
            ledger.lift_limit()
            applied.close()


def _short_of(error: BaseException) -> str:
    """Return the memory that had no room, or an empty text for another error."""
    if isinstance(error, WorkLostError) and error.__cause__ is not None:
        # A step had begun and found no memory: its weights are lost, and `Before` has a copy.
        return _short_of(error.__cause__)
    if isinstance(error, BudgetError) or device_is_full(error):
        return "device"
    if isinstance(error, PinningError):
        return "pinned"
    return "host" if isinstance(error, MemoryError) else ""


def _retries(device: Device) -> int:
    """Count the bytes that a fragmented cache has cost; where segments grow, a released cache was merely full."""
    allocator = device.allocator
    return 0 if allocator is None or allocator.segments_grow else allocator.retries
