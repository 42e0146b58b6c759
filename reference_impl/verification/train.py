# SPDX-License-Identifier: Apache-2.0
"""Trains the small decoder for some steps and measures it: losses, parameters, bytes of both tiers, step time.

One seed makes model and data the same for every run, and on CUDA, kernels that add in a fixed order are chosen. So
two runs differ only by the mechanisms attached to the model.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.kernels import kernels
from reference_impl.verification.workload import FIRST_MEASURED, FIRST_TIMED, Workload


class Trainer(Protocol):
    """The methods of an optimizer that a loop needs."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


# Attaches a mechanism to the model while the context is open, and gives the optimizer to train with.
Attach = Callable[[nn.Module], AbstractContextManager[Trainer]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a run; `parameters` are on the CPU, `step_s` is the median of the timed steps, NaN without any."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    peak_device_bytes: int
    between_steps_bytes: int
    peak_host_bytes: int
    step_s: float


def train(
    workload: Workload,
    device: Device,
    attach: Attach,
    *,
    fixed_order: bool = True,
    is_timed: bool = True,
    steps: int | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Trained:
    """Train from the first weights with `attach`'s optimizer and leave nothing behind; `on_step` follows each step.

    Without `fixed_order` the kernels are as for users: faster, and no two runs need be bitwise the same. `steps` ends
    the run early. Where it is not timed, the ledger counts the last steps too, as a budget of activations on the CPU
    twin needs.
    """
    gc.collect()
    batches = islice(workload.batches(device), steps)
    losses: list[torch.Tensor] = []
    with kernels(device, fixed_order=fixed_order), ExitStack() as attached:
        with Ledger(device) as ledger:
            model = workload.model(device)
            optimizer = attached.enter_context(attach(model))

            def train_some(steps: int) -> list[float]:
                times = []
                for ids in islice(batches, steps):
                    start = time.perf_counter()
                    losses.append(_step(workload, model, optimizer, ids))
                    # The end of the compute stream's work: an update that hides behind the next forward is paid there,
                    # if at all.
                    device.record().synchronize()
                    times.append(time.perf_counter() - start)
                    on_step()
                return times

            train_some(FIRST_MEASURED)
            ledger.reset_peak()
            train_some(FIRST_TIMED - FIRST_MEASURED)
            # Memory of an update that hides behind the next forward does not stay between steps.
            getattr(optimizer, "synchronize", device.synchronize)()
            between_steps_bytes = ledger.device_bytes
            peak_device_bytes, peak_host_bytes = ledger.peak_device_bytes, ledger.peak_host_bytes
            if not is_timed:
                train_some(workload.steps - FIRST_TIMED)
        times = train_some(workload.steps - FIRST_TIMED) if is_timed else []
        device.synchronize()
    return Trained(
        losses=torch.stack(losses).tolist(),
        parameters={name: param.detach().cpu() for name, param in model.named_parameters()},
        peak_device_bytes=peak_device_bytes,
        between_steps_bytes=between_steps_bytes,
        peak_host_bytes=peak_host_bytes,
        step_s=statistics.median(times) if times else math.nan,
    )


def _step(
    workload: Workload, model: nn.Module, optimizer: Trainer, micro_batches: torch.Tensor
) -> torch.Tensor:
    """Train one step and return the mean loss of its micro-batches, detached."""
    losses = []
    # Offloading optimizers send gradients off in backward, which only the last micro-batch may do.
    accumulate = getattr(optimizer, "accumulate", nullcontext)
    for index, ids in enumerate(micro_batches, start=1):
        with nullcontext() if index == len(micro_batches) else accumulate():
            loss = workload.loss(model, ids) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
            del loss
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()
