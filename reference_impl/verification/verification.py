"""What `verify` found: every run beside the one without offload, judged, and as plain data.

The document is described by `schema/verify.schema.json`; within one major `schema_version` fields are only added.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reference_impl.verification.mechanisms import Mechanism
from reference_impl.verification.train import Trained
from reference_impl.verification.workload import Workload

SCHEMA_VERSION = "1.0"
MAX_LOSS_DELTA = 0.001
MAX_MEMORY_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism beside the run without offload; `problems` says what did not agree.

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
