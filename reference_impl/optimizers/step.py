"""What one optimizer step has decided before any update begins.

Every share works from the same plan, and nothing in it changes while the step runs: whoever finishes the step later
has all that it needs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reference_impl.optimizers.clip_decision import ClipDecision


def snapshot(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the hyper-parameters of parameter groups, tensors included, without the parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


@dataclass(frozen=True, eq=False, slots=True)
class StepPlan:
    """The hyper-parameters of one step, by group, and its clip decision.

    Without a decision gradients are taken as they are and the step is not skipped.
    """

    groups: list[dict[str, Any]]
    decision: ClipDecision | None

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError when the hyper-parameters in `groups` are not those of this plan.

        They belong to `step()`, so they may not change once backward has used them.
        """
        for used, now in zip(self.groups, groups, strict=True):
            for key, value in used.items():
                if value != now[key]:
                    raise RuntimeError(
                        f"{key} changed from {value} to {now[key]} between backward and step(), after the update "
                        "had begun; expected it to stay; try changing it after step(), or "
                        "backward_overlap='gradients'"
                    )
