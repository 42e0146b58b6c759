# SPDX-License-Identifier: Apache-2.0
"""Was the plan right? Trains its model with and without it, and puts measurements beside predictions.

Peaks are judged; step times are shown, since they are predictions for the machine that the plan names. Losses are
judged too, in runs whose kernels add in a fixed order, because the results of other kernels differ from run to run.

Explained in docs/choosing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reference_impl.activations.budget import BudgetError
from reference_impl.device import Device
from reference_impl.distributed.launch import RankError, Report, launch
from reference_impl.memory.host import HostMemoryError, available_bytes
from reference_impl.memory.pinned import pinned_book
from reference_impl.verification.apply import apply_plan
from reference_impl.verification.attachments import OPTIONS, plain
from reference_impl.verification.kernels import always_in_fixed_order
from reference_impl.verification.plain import PlainAdamW
from reference_impl.verification.planned_run import PlanError, PlannedRun, Predicted
from reference_impl.verification.steps import Progress, Steps, unseen
from reference_impl.verification.train import Attach, Trained, Trainer, train
from reference_impl.verification.verify import (
    MAX_LOSS_DELTA,
    MAX_MEMORY_ERROR,
    SCHEMA_VERSION,
    loss_delta,
)

# Of a process that has loaded torch.
_PROCESS_BYTES = 2**28
# Updates that a plan got wrong show after one; further steps only let rounding errors grow.
COMPARED_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of a run, in bytes, seconds or as a ratio; `error` is measured over predicted, less 1."""

    name: str
    predicted: float
    measured: float
    error: float | None


# States in fewer bits differ from the first step on; a step that goes wrong shows as more than this.
_MAX_ROUNDED_LOSS_DELTA = 0.05


@dataclass(frozen=True, kw_only=True)
class PlanVerification:
    """The plan's run, and the run without the plan if it fits on the device.

    `compared` are the runs without and with the plan whose losses are judged: on CUDA two short ones of their own.
    """

    device: str
    is_timed: bool
    planned: PlannedRun
    trained: Trained
    without_offload: Trained | None
    compared: tuple[Trained, Trained] | None

    @property
    def max_loss_delta(self) -> float | None:
        """The largest difference of the judged losses, or None without a run to compare with."""
        return None if self.compared is None else loss_delta(*self.compared)

    @property
    def runs(self) -> dict[str, list[Quantity]]:
        """Predictions and measurements of each run: bytes, and times on CUDA alone."""
        planned, baseline = self.planned, self.without_offload
        runs = {planned.with_plan.label: (planned.with_plan, self.trained)}
        if baseline is not None:
            runs["without offload"] = (planned.without_offload, baseline)
        found = {label: _bytes(predicted, trained) for label, (predicted, trained) in runs.items()}
        if self.is_timed:
            for label, (predicted, trained) in runs.items():
                found[label].append(_quantity("step seconds", predicted.step_s, trained.step_s))
            if baseline is not None:
                ratio = planned.with_plan.step_s / planned.without_offload.step_s
                measured = self.trained.step_s / baseline.step_s
                found[planned.with_plan.label].append(_quantity("step ratio", ratio, measured))
        return found

    @property
    def problems(self) -> list[str]:
        """Disagreements."""
        problems = []
        for label, quantities in self.runs.items():
            peak = quantities[0]
            if peak.error is None or abs(peak.error) > MAX_MEMORY_ERROR:
                problems.append(
                    f"{label}: the peak is {peak.measured:,.0f} bytes; the plan says {peak.predicted:,.0f}; expected "
                    f"within {MAX_MEMORY_ERROR:.0%}{self._better_plan}"
                )
        delta, most = self.max_loss_delta, MAX_LOSS_DELTA
        if self.planned.has_other_numerics:
            most = _MAX_ROUNDED_LOSS_DELTA
        if delta is not None and delta >= most:
            problems.append(f"the loss differs by {delta:.3g}; expected less than {most}")
        return problems

    @property
    def _better_plan(self) -> str:
        """Advise a nearer plan: without a trace, memory is a formula, which is not as near for every model."""
        if "traced" in self.planned.document.get("model", {}):
            return ""
        return "; try `offload trace config.json --out profile.json`, and plan with --trace profile.json"

    def document(self) -> dict[str, Any]:
        """Return everything as plain data, by `schema/verify.schema.json`."""
        problems = self.problems
        return {
            "schema_version": SCHEMA_VERSION,
            "errors": [],
            "passed": not problems,
            "device": self.device,
            "torch": torch.__version__,
            "workload": self.planned.workload.describe(),
            "plan": {
                "machine": self.planned.machine,
                "max_loss_delta": self.max_loss_delta,
                "runs": [
                    {
                        "label": label,
                        "quantities": [
                            asdict(quantity) | {"error": quantity.error} for quantity in quantities
                        ],
                    }
                    for label, quantities in self.runs.items()
                ],
                "problems": problems,
            },
        }


@dataclass(frozen=True)
class _Run:
    """One training of a plan's model: with the plan or without it, for `steps` or the workload's steps.

    Without `fixed_order` it is about the kernels that users get, so the order of additions is left to them.
    """

    label: str
    has_plan: bool
    fixed_order: bool = False
    steps: int | None = None


def verify_plan(device: Device, planned: PlannedRun, *, progress: Progress = unseen) -> PlanVerification:
    """Train with the plan and, where it fits, without. Raises PlanError when it cannot be trained here.

    A plan for several GPUs is trained by as many processes, each with a GPU of its own or as a CPU twin.
    """
    planned = replace(
        planned, with_plan=planned.with_plan.on(device), without_offload=planned.without_offload.on(device)
    )
    if planned.workload.spread is not None:
        _check_ranks(device, planned.workload.spread.ranks)
    free_bytes = _free_bytes(device)
    needed_bytes = _needed_bytes(device, planned, planned.with_plan)
    if needed_bytes > free_bytes:
        raise PlanError(
            f"the plan needs {needed_bytes / 2**30:.1f} GiB and {device.name} has "
            f"{free_bytes / 2**30:.1f} GiB free",
            expected="memory for its model",
            attempt="a plan for a smaller model or a shorter sequence",
        )
    compares = _needed_bytes(device, planned, planned.without_offload) <= free_bytes
    compares_apart = compares and not always_in_fixed_order(device)
    total = planned.workload.steps * (1 + compares) + 2 * COMPARED_STEPS * compares_apart
    steps = Steps(progress, total=total)
    measured = [_Run("without offload", has_plan=False)] * compares
    measured.append(_Run(planned.with_plan.label, has_plan=True))
    try:
        *baseline, trained = _trained(device, planned, measured, steps)
    except (BudgetError, HostMemoryError) as error:
        raise PlanError.of(
            error,
            "the plan cannot be kept here: ",
            attempt="a plan with --gpu-memory and --host-memory as they are here",
        ) from None
    compared = (baseline[0], trained) if baseline else None
    if compares_apart:
        compared = _in_fixed_order(device, planned, steps)
    return PlanVerification(
        device=device.name,
        is_timed=device.is_accelerator,
        planned=planned,
        trained=trained,
        without_offload=baseline[0] if baseline else None,
        compared=compared,
    )


def _check_ranks(device: Device, ranks: int) -> None:
    """Raise PlanError if this machine lacks a device for each rank, or for a limit of one process."""
    if device.is_accelerator and device.count() < ranks:
        raise PlanError(
            f"the plan is for {ranks} GPUs and {device.count()} are here",
            expected="one for each rank",
            attempt="--device cpu, where a rank needs no GPU",
        )
    if pinned_book.limit_bytes is not None:
        raise PlanError(
            f"a limit of pinned memory, which is this process's, and a plan of {ranks} ranks",
            expected="a plan of one GPU with it",
            attempt="offload plan --pinned-memory: the plan then sets the limit on each rank",
        )


def _in_fixed_order(device: Device, planned: PlannedRun, steps: Steps) -> tuple[Trained, Trained] | None:
    """Train some steps without the plan and with it, so that their losses differ by the plan alone.

    Return None if these kernels do not fit: they take more memory than the plan's.
    """
    runs = [
        _Run("losses without offload", has_plan=False, fixed_order=True, steps=COMPARED_STEPS),
        _Run(f"losses, {planned.with_plan.label}", has_plan=True, fixed_order=True, steps=COMPARED_STEPS),
    ]
    try:
        without, with_plan = _trained(device, planned, runs, steps)
    except (BudgetError, HostMemoryError, torch.OutOfMemoryError):
        return None
    return without, with_plan


def _trained(device: Device, planned: PlannedRun, runs: Sequence[_Run], steps: Steps) -> list[Trained]:
    """Train `runs` one after the other, here or on all ranks of the plan."""
    on_step = {run.label: steps.of(run.label) for run in runs}
    spread = planned.workload.spread
    if spread is None:
        steps.begin(f"building the model for {len(runs)} runs")
        return [_train(device, planned, run, on_step[run.label]) for run in runs]
    steps.begin(f"starting {spread.ranks} ranks, each of which builds its part of the model")
    try:
        ranks = launch(spread.ranks, device, partial(_of_rank, planned, runs), lambda label: on_step[label]())
    except RankError as error:
        raise PlanError.of(error, attempt="a plan for fewer GPUs or a smaller model") from None
    return [_of_all(each) for each in zip(*ranks, strict=True)]


def _of_rank(planned: PlannedRun, runs: Sequence[_Run], device: Device, report: Report) -> list[Trained]:
    """Train `runs` as one rank; the first one reports each step by its run's label."""
    reports = report if dist.get_rank() == 0 else lambda _: None
    return [_train(device, planned, run, partial(reports, run.label)) for run in runs]


def _of_all(ranks: Sequence[Trained]) -> Trained:
    """Return the most that any rank took of each, and the losses of all, one rank's behind the other's."""
    return Trained(
        losses=[loss for rank in ranks for loss in rank.losses],
        parameters={},
        peak_device_bytes=max(rank.peak_device_bytes for rank in ranks),
        between_steps_bytes=max(rank.between_steps_bytes for rank in ranks),
        peak_host_bytes=max(rank.peak_host_bytes for rank in ranks),
        step_s=max(rank.step_s for rank in ranks),
    )


def _train(device: Device, planned: PlannedRun, run: _Run, on_step: Callable[[], None]) -> Trained:
    trained = train(
        planned.workload,
        device,
        _applied(planned) if run.has_plan else plain(),
        fixed_order=run.fixed_order,
        is_timed=device.is_accelerator,
        steps=run.steps,
        on_step=on_step,
    )
    # Nobody asks for the parameters, and their host memory belongs to the runs that follow.
    return replace(trained, parameters={})


def _applied(planned: PlannedRun) -> Attach:
    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        offloads = {"optimizer", "trained_layers", "streamed_shards"} & set(planned.document["execute"])
        optimizer: Any = (
            torch.optim.AdamW(model.parameters(), **OPTIONS) if offloads else PlainAdamW(model, **OPTIONS)
        )
        try:
            applied = apply_plan(model, optimizer, planned.document)
        except ValueError as error:
            raise PlanError.of(error, attempt="a plan written by this release") from None
        with applied:
            yield applied.optimizer

    return attach


def _bytes(predicted: Predicted, trained: Trained) -> list[Quantity]:
    return [
        _quantity("peak device bytes", predicted.peak_device_bytes, trained.peak_device_bytes),
        _quantity("device bytes between steps", predicted.between_steps_bytes, trained.between_steps_bytes),
        _quantity("host bytes", predicted.host_bytes, trained.peak_host_bytes),
    ]


def _quantity(name: str, predicted: float, measured: float) -> Quantity:
    error = measured / predicted - 1 if predicted else None
    return Quantity(name=name, predicted=predicted, measured=measured, error=error)


def _needed_bytes(device: Device, planned: PlannedRun, predicted: Predicted) -> int:
    """The device memory of a run; the two tiers of all ranks' CPU twins are one memory."""
    if device.is_accelerator:
        return predicted.peak_device_bytes
    spread = planned.workload.spread
    needed_bytes = predicted.peak_device_bytes + predicted.host_bytes
    return needed_bytes if spread is None else spread.ranks * (needed_bytes + _PROCESS_BYTES)


def _free_bytes(device: Device) -> int:
    # Memory that an earlier run has left in the allocator's cache is free.
    return available_bytes() if device.allocator is None else device.allocator.free_bytes()
