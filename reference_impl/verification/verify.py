# SPDX-License-Identifier: Apache-2.0
"""Does every mechanism give the results of a run without it, and free the memory that it should?

Trains a small decoder without offload and with each mechanism, from the same weights on the same data, and compares:
losses, final parameters, peak device bytes against a prediction. It judges mechanisms on this machine; `offload plan`
says the needs of a large model.

The document is described by `schema/verify.schema.json`; within one major `schema_version` fields are only added.

Explained in docs/choosing.md.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reference_impl.device import Device
from reference_impl.verification.attachments import plain
from reference_impl.verification.model import DecoderShape
from reference_impl.verification.rows import (
    Mechanism,
    Reference,
    Scale,
    activation_rows,
    optimizer_rows,
    weight_rows,
)
from reference_impl.verification.steps import Progress, Steps, unseen
from reference_impl.verification.train import Trained, train
from reference_impl.verification.workload import Workload

SCHEMA_VERSION = "1.0"
MAX_LOSS_DELTA = 0.001
MAX_MEMORY_ERROR = 0.05

# Sizes at which activations outweigh gradients. The peak of every row is then that of the loss, with nothing but
# weights, states and activations alive. Kernels of the CPU twin are a few milliseconds long.
TWIN = Scale(
    workload=Workload(
        shape=DecoderShape(hidden=96, ffn=256, layers=4, heads=3, vocab=1024), batch=3, tokens=128, steps=8
    ),
    min_bytes=2**10,
    chunk_bytes=192 * 2**10,
)
ACCELERATOR = Scale(
    workload=Workload(
        shape=DecoderShape(hidden=1024, ffn=2816, layers=8, heads=8, vocab=32000), batch=8, tokens=1024
    ),
    min_bytes=2**20,
    chunk_bytes=96 * 2**20,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism beside the run without offload; `problems` lists disagreements.

    `memory_error` is the share by which the measured fall of the peak lies above the predicted one.
    """

    name: str
    contract: str
    max_loss_delta: float
    parameters_equal: bool
    peak_device_bytes: int
    between_steps_bytes: int
    host_bytes: int
    predicted_fall_bytes: int
    formula: str
    measured_fall_bytes: int
    memory_error: float
    step_s: float
    step_ratio: float
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The run without offload and every row that was compared with it or its clipped twin."""

    device: str
    workload: Workload
    without_offload: Trained
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether no row has a problem."""
        return not any(row.problems for row in self.rows)

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        baseline = self.without_offload
        return {
            "schema_version": SCHEMA_VERSION,
            "errors": [],
            "passed": self.passed,
            "device": self.device,
            "torch": torch.__version__,
            "workload": self.workload.describe(),
            "without_offload": {
                "first_loss": baseline.losses[0],
                "last_loss": baseline.losses[-1],
                "peak_device_bytes": baseline.peak_device_bytes,
                "between_steps_bytes": baseline.between_steps_bytes,
                "step_s": baseline.step_s,
            },
            "rows": [asdict(row) | {"problems": list(row.problems)} for row in self.rows],
        }


def verify(device: Device, *, progress: Progress = unseen) -> Verification:
    """Train every row on `device` and judge it; on the CPU twin this takes less than a minute."""
    scale = ACCELERATOR if device.is_accelerator else TWIN
    without_offload = Reference(name="without offload", workload=scale.workload)
    expected: dict[Reference, Trained] = {}
    rows = [
        *optimizer_rows(scale, without_offload),
        *activation_rows(
            scale, without_offload, device, lambda reference: expected[reference].peak_device_bytes
        ),
        *weight_rows(scale),
    ]
    references = dict.fromkeys(row.reference for row in rows)
    steps = Steps(progress, total=(len(rows) + len(references)) * scale.workload.steps)
    for reference in references:
        attach = plain(max_grad_norm=reference.max_grad_norm)
        expected[reference] = train(reference.workload, device, attach, on_step=steps.of(reference.name))
    judged: list[Row] = []
    for row in rows:
        trained = train(row.reference.workload, device, row.attach, on_step=steps.of(row.name))
        bitwise = row.same_kernels or not device.is_accelerator
        judged.append(compare(row, expected[row.reference], trained, bitwise=bitwise))
    return Verification(
        device=device.name,
        workload=scale.workload,
        without_offload=expected[without_offload],
        rows=tuple(judged),
    )


def loss_delta(baseline: Trained, trained: Trained) -> float:
    """Return the largest absolute difference of the losses of two runs; infinite where one is not a number."""
    deltas = [abs(a - b) for a, b in zip(trained.losses, baseline.losses, strict=True)]
    return max(delta if math.isfinite(delta) else math.inf for delta in deltas)


def compare(mechanism: Mechanism, baseline: Trained, trained: Trained, *, bitwise: bool) -> Row:
    """Judge `trained` by `baseline`; `bitwise` says that every bit of losses and parameters is promised."""
    delta = loss_delta(baseline, trained)
    equal = all(torch.equal(param, baseline.parameters[name]) for name, param in trained.parameters.items())
    fall_bytes = baseline.peak_device_bytes - trained.peak_device_bytes
    memory_error = fall_bytes / mechanism.freed_bytes - 1
    problems = []
    if bitwise and not (equal and delta == 0):
        problems.append(f"not bitwise equal: the loss differs by {delta:.3g}, parameters equal: {equal}")
    elif delta >= MAX_LOSS_DELTA:
        problems.append(f"the loss differs by {delta:.3g}; expected less than {MAX_LOSS_DELTA}")
    if abs(memory_error) > MAX_MEMORY_ERROR:
        problems.append(
            f"the peak fell by {fall_bytes:,} bytes; expected {mechanism.freed_bytes:,} within {MAX_MEMORY_ERROR:.0%}"
        )
    return Row(
        name=mechanism.name,
        contract="bitwise" if bitwise else f"loss within {MAX_LOSS_DELTA}",
        max_loss_delta=delta,
        parameters_equal=equal,
        peak_device_bytes=trained.peak_device_bytes,
        between_steps_bytes=trained.between_steps_bytes,
        host_bytes=trained.peak_host_bytes,
        predicted_fall_bytes=mechanism.freed_bytes,
        formula=mechanism.formula,
        measured_fall_bytes=fall_bytes,
        memory_error=memory_error,
        step_s=trained.step_s,
        step_ratio=trained.step_s / baseline.step_s,
        problems=tuple(problems),
    )
