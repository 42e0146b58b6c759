# SPDX-License-Identifier: Apache-2.0
"""`ActivationOffloader`: saved activations are kept on the host between forward and backward.

Layer-level, it moves the tensors that whole layers save; module-level, the inputs of named modules. Either way the
step is bitwise the same in less device memory. `CheckpointOffloader` recomputes layers; this one does not.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reference_impl.activations.attach import (
    Around,
    Forward,
    blocks_or_none,
    check_one_choice,
    first_blocks,
    modules_called,
    named_layers,
)
from reference_impl.activations.budget import BudgetPlan
from reference_impl.activations.budget_policy import Budget, BudgetPolicy
from reference_impl.activations.offloaded_weights import OffloadedWeights
from reference_impl.activations.offloader import EngineOptions, Offloader
from reference_impl.activations.policy import EvenFraction, Nothing, Policy
from reference_impl.activations.run import ForwardPass
from reference_impl.activations.tape import Tape
from reference_impl.memory.closing import close_behind, do_undoably
from reference_impl.memory.compiler import uncompiled
from reference_impl.memory.rates import measure_link


class ActivationOffloader(Offloader):
    """Offloads layers' tensors saved for backward, or modules' saved inputs.

    >>> with ActivationOffloader(model, num_layers=24):
    ...     train(model)

    Without `num_layers`, `layers` and `modules`, all layers take part.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_layers: int | None = None,
        layers: Iterable[str | nn.Module] | None = None,
        modules: Sequence[str] | None = None,
        activations: bool = True,
        weights: bool = False,
        fraction: float = 1.0,
        keep_last_bytes: int = 0,
        budget_bytes: Budget | None = None,
        plan: BudgetPlan | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Attach to `model`.

        Args:
            model: any module; its blocks are found in its outermost `nn.ModuleList`, or named in `layers`.
            num_layers: offload the saved tensors of the first so many blocks; 1 to all.
            layers: offload the saved tensors of these modules, given as names or modules. A budget or a plan then
                decides about these tensors alone.
            modules: offload the inputs of all modules whose dotted names end in one of these.
            activations: whether saved tensors move; with False, which needs `weights=True`, only weights do.
            weights: whether the layers' weights are on the host too, from the end of a layer's forward until its
                backward.
            fraction: the share of the bytes to offload, spread evenly over each forward.
            keep_last_bytes: bytes at the end of each forward that stay, since backward needs them at once. Across
                pipeline ranks, `rank * delta_bytes` keeps more where fewer micro-batches are in flight.
            budget_bytes: instead, the most device bytes that a step may take. The first two steps offload
                everything, and the second is profiled. From the third on each saved tensor is kept, offloaded or
                computed again, whichever makes the step fastest. "least" is the peak with everything offloaded and
                1/128 more, for the allocator's rounding. A smaller budget raises BudgetError in the forward of the
                second or third step.
            plan: instead, the `plan` of an earlier offloader, carried out from the first step.
            options: see `EngineOptions`.

        Raises:
            ValueError: an option out of range, a name that matches nothing, or two ways of choosing at once.
        """
        _check_choices(
            num_layers=num_layers, layers=layers, modules=modules, budget_bytes=budget_bytes, plan=plan
        )
        is_planned = budget_bytes is not None or plan is not None
        if weights and (modules is not None or is_planned):
            raise ValueError(
                "weights=True offloads the weights of whole layers, which nothing else may read; expected num_layers "
                "or layers, not modules, a budget or a plan; try weights=False"
            )
        if not activations and (modules is not None or is_planned or not weights):
            raise ValueError(
                "activations=False leaves nothing to move; expected weights=True beside num_layers or layers; "
                "try activations=True"
            )
        if is_planned and (fraction != 1.0 or keep_last_bytes):
            raise ValueError(
                f"fraction={fraction} and keep_last_bytes={keep_last_bytes} choose the tensors that move, and so does "
                "a plan; expected one of them; try a smaller or larger budget_bytes alone"
            )
        self._share = EvenFraction(fraction=fraction, keep_last_bytes=keep_last_bytes)
        around: Around
        if modules is not None:
            chosen, around = modules_called(model, modules), self._around_module
        else:
            chosen = first_blocks(model, num_layers) if layers is None else named_layers(model, layers)
            around = self._around_layer
        if budget_bytes is not None:
            # A plan counts every byte: an allowance would come on top of the budget.
            options = {"in_flight_bytes": 0, **options}
        try:
            super().__init__(model, **options)
            self._budget: BudgetPolicy | None = None
            if is_planned:
                self._budget = BudgetPolicy(
                    self.engine.headroom,
                    self.device,
                    lambda size_bytes: measure_link(self.device, self.arena, probe_bytes=size_bytes),
                    budget_bytes=budget_bytes,
                    plan=plan,
                )
            self._policy: Policy = self._budget or self._share
            if not activations:
                self._policy = Nothing()
            self._weights: OffloadedWeights | None = None
            if weights:
                do_undoably(partial(self._hold_weights, model, chosen), self._undo)
            for module in chosen:
                self._wrap(module, around)
            self._follow(blocks_or_none(model) or chosen, chosen)
        except BaseException as error:
            close_behind(error, self.close)
            raise

    def _hold_weights(self, model: nn.Module, layers: list[nn.Module]) -> Callable[[], None]:
        self._weights = OffloadedWeights(self.device, self.arena, model, layers, min_bytes=self.min_bytes)
        return self._weights.close

    @property
    def offloaded_weight_bytes(self) -> int:
        """Bytes of weights that have been copied to the host since the start."""
        return 0 if self._weights is None else self._weights.moved_bytes

    @property
    def has_budget(self) -> bool:
        """Whether a plan decides which storages move."""
        return self._budget is not None

    @property
    def plan(self) -> BudgetPlan | None:
        """The plan, for printing or for the next job; a budget has none before the third step."""
        return None if self._budget is None else self._budget.plan

    def _largest_small_bytes(self) -> int:
        return 0 if isinstance(self._policy, Nothing) else super()._largest_small_bytes()

    def _pass_over(self, transform: str) -> None:
        if self._weights is not None:
            raise RuntimeError(
                f"{transform} was called through layers whose weights are offloaded (weights=True), and nothing says "
                "there when its backward needs them; expected weights that stay; try weights=False, or close() before"
            )
        super()._pass_over(transform)

    def _start_run(self, run: ForwardPass) -> None:
        if self._budget is None:
            return
        plan = self._budget.plan
        self._budget.start_run(run)
        if not self._budget.needs_tape:
            self.engine.tape = None
        elif self.engine.tape is None or self._budget.plan is not plan:
            self.engine.tape = Tape(self.device, self.engine.weights, min_bytes=self.min_bytes)
        if self.engine.tape is not None:
            self.engine.tape.is_timing = self._budget.plan is None

    def _around_layer(
        self, forward: Forward, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        weights = self._weights
        if weights is None:
            with self.engine.saving(layer, self._policy):
                return forward(*args, **kwargs)
        uncompiled(weights.before_forward)(layer)
        with self.engine.saving(layer, self._policy, bring_weights=weights.bring(layer)):
            result = forward(*args, **kwargs)
        uncompiled(weights.after_forward)(layer)
        return result

    def _around_module(
        self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        with self.engine.saving(module, self._share, only=inputs):
            return forward(*args, **kwargs)


def _check_choices(
    *,
    num_layers: int | None,
    layers: Iterable[str | nn.Module] | None,
    modules: Sequence[str] | None,
    budget_bytes: Budget | None,
    plan: BudgetPlan | None,
) -> None:
    """Raise ValueError for two ways of choosing at once, an empty list, or a budget that is another word."""
    check_one_choice(num_layers=num_layers, layers=layers, modules=modules)
    check_one_choice(modules=modules, budget_bytes=budget_bytes, plan=plan)
    if modules is not None and not modules:
        raise ValueError(
            "modules is empty; expected one or more endings of names; try modules=['core_attention']"
        )
    if isinstance(budget_bytes, str) and budget_bytes != "least":
        raise ValueError(
            f"budget_bytes={budget_bytes!r}; expected a number of bytes, or 'least'; try 'least'"
        )
