# SPDX-License-Identifier: Apache-2.0
"""The offloads that a user wants in a trainer: a plan, or an option per mechanism; checked before anything is touched.

Explained in docs/trainers.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.activations.attach import first_blocks
from reference_impl.activations.offloader import EngineOptions
from reference_impl.integrations.planned import Plan, planned
from reference_impl.optimizers import Budgets, HybridDeviceOptimizer
from reference_impl.verification.apply import check_planned_for
from reference_impl.verification.plan_document import MODES
from reference_impl.weights import FrozenLayerStreamer

Options = Mapping[str, Any]

AUTO = "auto"
# Arguments that the trainer has already.
_TRAINERS_OWN = frozenset(("params", "algorithm", "max_grad_norm", "reduce_norm_squared", "hyper_parameters"))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of each mechanism; None where it is not wanted.

    Args:
        optimizer: options of `HybridDeviceOptimizer`, without the ones that the trainer has already.
        activations: `mode` (`layers`, `checkpoint`, `recompute`, `budget`), and options of its offloader.
        weights: options of `FrozenLayerStreamer`.
        tiles: options of `SequenceTiles`, from a plan.
        head_groups: options of `HeadGroups`, from a plan.
        planned_for: the document of a plan, which says its model's size.
        formula: the plan's formula for matrices, such as `muon`; None for AdamW alone, or without a plan.
    """

    optimizer: Options | None = None
    activations: Options | None = None
    weights: Options | None = None
    tiles: Options | None = None
    head_groups: Options | None = None
    planned_for: Options | None = None
    formula: str | None = None

    @staticmethod
    def of(
        plan: Plan | None = None,
        *,
        optimizer: bool | str | Options = False,
        activations: str | Options | None = None,
        weights: bool | Options = False,
    ) -> Wanted:
        """Return the meaning of the arguments, either a plan or words.

        Args:
            plan: the document of `offload plan --framework pytorch --format json`, or its path; or `auto`, which is
                `optimizer="auto"`.
            optimizer: True, `auto` for the fastest split on this machine, or options.
            activations: a mode, or a mapping of `mode` and options.
            weights: True, or options.

        Raises ValueError for anything else, and OSError for a plan that cannot be read.
        """
        if plan is not None and (optimizer or activations or weights):
            named = [
                name
                for name, value in {
                    "optimizer": optimizer,
                    "activations": activations,
                    "weights": weights,
                }.items()
                if value
            ]
            raise ValueError(
                f"a plan and {', '.join(named)} both say what is offloaded; expected one of the two; try the plan alone"
            )
        if isinstance(plan, str) and plan == AUTO:
            plan, optimizer = None, AUTO
        if plan is not None:
            return Wanted(**planned(plan))
        wanted = Wanted(
            optimizer=_options(
                "optimizer", optimizer, {AUTO: {"split": AUTO}}, _accepted(HybridDeviceOptimizer)
            ),
            activations=_activations(activations),
            weights=_options("weights", weights, {}, _accepted(FrozenLayerStreamer)),
        )
        if wanted == Wanted():
            raise ValueError("nothing is to be offloaded; expected a plan or a mechanism; try optimizer=True")
        return wanted

    def check(self, model: nn.Module) -> None:
        """Raise ValueError where this is for another model than `model`."""
        if self.planned_for is not None:
            check_planned_for(self.planned_for, model)
        if self.activations is not None and self.activations["mode"] == "layers":
            first_blocks(model, self.activations.get("num_layers"))
        if self.weights is not None and all(param.requires_grad for param in model.parameters()):
            raise ValueError(
                f"weights are to stream, but all parameters of {type(model).__name__} are trained; expected a frozen "
                "base with adapters; try peft's get_peft_model, or leave weights out"
            )


def agreed(options: Options) -> dict[str, Any]:
    """Return `options` of the optimizer, by which all processes of this run, if several, take one `auto` split."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if options.get("split") != AUTO or not several:
        return dict(options)
    budgets = options.get("budgets", Budgets())
    return {**options, "budgets": replace(budgets, ranks=budgets.ranks or dist.group.WORLD)}


def _accepted(mechanism: Callable[..., Any]) -> frozenset[str]:
    named = frozenset(inspect.signature(mechanism).parameters) - {"model", "options"}
    engine = EngineOptions.__annotations__ if mechanism in (ActivationOffloader, CheckpointOffloader) else ()
    return (named | frozenset(engine)) - _TRAINERS_OWN


def _activations(given: str | Options | None) -> Options | None:
    if given is None:
        return None
    options = {"mode": given} if isinstance(given, str) else dict(given)
    mode = options.get("mode")
    if mode not in MODES:
        raise ValueError(
            f"activations has mode {mode!r}; expected one of {', '.join(MODES)}; try 'checkpoint'"
        )
    if mode == "budget":
        options.setdefault("budget_bytes", "least")
    mechanism = ActivationOffloader if mode in ("layers", "budget") else CheckpointOffloader
    return _options("activations", options, {}, _accepted(mechanism) | {"mode"})


def _options(name: str, given: Any, words: Options, accepted: frozenset[str]) -> Options | None:
    if given is None or given is False:
        return None
    if given is True:
        return {}
    found = words.get(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        expected = ", ".join(("True", *map(repr, words)))
        raise ValueError(f"{name} is {given!r}; expected {expected} or a mapping of options; try {name}=True")
    unknown = sorted(str(key) for key in found if key not in accepted)
    if unknown:
        raise ValueError(
            f"{name} has {', '.join(unknown)}; expected some of {', '.join(sorted(accepted))}; try the trainer's own "
            "arguments for the others"
        )
    return found
