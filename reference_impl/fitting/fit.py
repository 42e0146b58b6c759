"""`fit`: from a model, its optimizer and a batch to the offload that trains it on this machine, without any setting.

>>> with fit(model, torch.optim.AdamW(model.parameters(), lr=2e-5), batch) as fitted:
...     print(fitted.summary)
...     for batch in batches:
...         model(**batch).loss.backward()
...         fitted.optimizer.step()
...         fitted.optimizer.zero_grad()

Explained in docs/fitting.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reference_impl.device import Device
from reference_impl.fitting.before import Before, without_caches
from reference_impl.fitting.planner import Plan, Planner, RefusedPlanError, complete
from reference_impl.fitting.search import Search
from reference_impl.fitting.trial import Loss, Task
from reference_impl.memory.closing import ClosedAtExit
from reference_impl.memory.host import available_bytes
from reference_impl.verification.apply import AppliedPlan
from reference_impl.verification.plan_document import execute_section, read_document
from reference_impl.verification.trace import own_loss
from reference_impl.verification.trace_profile import profile_batch

_LOG = logging.getLogger(__name__)

Budget = int | Literal["auto"]
# Of what the host has, the rest is for whoever else allocates there: the data loader, torch, the kernel.
_HOST_SHARE = 0.9
# The formula is within this of most Hugging Face models (docs/tracing.md).
_FORMULA_ERROR = 0.08


class FitError(ValueError):
    """No offload of this package trains the model here, or nobody can say which: the sentence says why."""


class Fitted(ClosedAtExit):
    """A model under the plan that was settled on; a context manager.

    `optimizer` is the one to step. `plan` is the document of `schema/plan.schema.json`, with what was measured under
    `fitted`; `apply_plan` takes it. `summary` is one line.
    """

    def __init__(self, applied: AppliedPlan, plan: Plan, summary: str, stack: ExitStack) -> None:
        self.optimizer = applied.optimizer
        self.plan = plan
        self.summary = summary
        self._stack = stack

    def close(self) -> None:
        """Leave the model as it was and give the host memory back. Calling it again does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Return this; the plan is in force already."""
        return self


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: Loss | None = None,
    *,
    gpu_budget: Budget = "auto",
    host_budget: Budget = "auto",
    pinned_budget: Budget = "auto",
    max_grad_norm: float | None = None,
    plan: Plan | str | Path | None = None,
    allow_other_numerics: bool = False,
    device: torch.device | str | None = None,
) -> Fitted:
    """Find the plan that trains `model` here and apply it; weights and random state stay what they are.

    Traces a step of the model, asks the planner, and tries its plan for two steps on `batch`; where the true peak or
    the lack of memory says so, it tries a corrected one. The batch should be the largest that will be trained on.

    Args:
        model: on its device, or on the CPU with `device`, with its blocks in an `nn.ModuleList`.
        optimizer: a `torch.optim.AdamW`; what is fitted takes its groups and states over.
        batch: keyword arguments as a mapping, or one positional argument.
        loss: `loss(model, batch)` returns a scalar tensor; by default it is the `loss` of what the model returns.
        gpu_budget: bytes that torch's allocator may reserve; by default all that the device has free.
        host_budget: bytes of host memory for what is offloaded; by default nine tenths of what is available.
        pinned_budget: bytes of it that may be page-locked; by default as much as the machine has been found to take.
        max_grad_norm: clip the global norm exactly, in the optimizer.
        plan: the plan to try first, a document of `offload plan --format json` or its path.
        allow_other_numerics: let a plan round optimizer states, which `fitted.plan` then says.
        device: where to run a model whose weights are on the CPU, because they may be larger than it; they are on the
            CPU again after `close()`. The batch is there already.

    Raises FitError where nothing fits, or where the model cannot be traced and no config describes it; ValueError for
    another optimizer and several ranks. The model and the optimizer are then as they were.
    """
    on, starts_on = _one_device(model, device)
    _check(optimizer)
    _check_budgets(gpu_budget=gpu_budget, host_budget=host_budget, pinned_budget=pinned_budget)
    first = None if plan is None else complete(_planned(plan))
    if loss is None and not isinstance(batch, Mapping | torch.Tensor):
        raise ValueError(
            f"the batch is {type(batch).__name__}; expected a mapping of keyword arguments, or one tensor; try "
            "loss=lambda model, batch: ..., which calls the model as you do"
        )
    task = Task(
        model=model,
        optimizer=optimizer,
        batch=batch,
        loss=loss or own_loss,
        max_grad_norm=max_grad_norm,
        device=on,
        on_host=device is not None and starts_on.type == "cpu",
    )
    model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(without_caches(model))
        described, error_share = _described(task)
        before = Before(model, optimizer, on)
        try:
            budget_bytes, host_bytes = _budgets(task, gpu_budget, host_budget)
            sequences, tokens = _size(batch)
            planner = Planner(
                described,
                sequences=sequences,
                tokens=tokens,
                host_bytes=host_bytes,
                pinned_bytes=None if pinned_budget == "auto" else pinned_budget,
                allow_other_numerics=allow_other_numerics,
            )
            search = Search(task, before, planner, budget_bytes, error_share=error_share, first=first)
            settled = search.settle()
            if gpu_budget != "auto" and on.allocator is not None:
                # What somebody has set is a fence until the end.
                on.allocator.limit(budget_bytes)
                stack.callback(on.allocator.limit, None)
            stack.enter_context(task.moved(settled.plan))
            applied = stack.enter_context(task.apply(settled.plan))
        except BaseException as error:
            before.restore()
            before.give_back()
            if isinstance(error, RefusedPlanError):
                raise FitError(f"nothing fits {budget_bytes / 2**30:.2f} GiB: {error}") from None
            raise
        optimizer.state.clear()
        document = settled.plan | {"fitted": settled.measured(budget_bytes)}
        fitted = Fitted(applied, document, settled.summary(budget_bytes), stack.pop_all())
    _LOG.info(fitted.summary)
    return fitted


def _planned(plan: Plan | str | Path) -> Plan:
    execute_section(plan)
    document = dict(read_document(plan))
    if "recommendation" not in document:
        raise ValueError(
            "the plan predicts nothing; expected one of `offload plan --format json`; try no plan"
        )
    return document


def _one_device(model: nn.Module, wanted: torch.device | str | None) -> tuple[Device, torch.device]:
    """Return where `model` runs, `wanted` or where it is, and where its weights are."""
    params = list(model.parameters())
    devices = {param.device for param in params}
    if len(devices) != 1:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices))) or 'no device'}; expected one; try "
            'model.to("cuda")'
        )
    if not any(param.requires_grad for param in params):
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient; expected some to train"
        )
    (there,) = devices
    on = Device.of(there if wanted is None else wanted)
    if there.type != "cpu" and there != on.torch_device:
        raise ValueError(
            f"device is {wanted}, and the model's parameters are on {there}; expected them there or on the CPU; try "
            f"device={str(there)!r}"
        )
    return on, there


def _check(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) is not torch.optim.AdamW:
        raise ValueError(
            f"fit offloads AdamW's state; got {type(optimizer).__name__}; try torch.optim.AdamW(model.parameters())"
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"{distributed.get_world_size()} ranks; expected one, because each would settle on a plan of its own; try "
            "`offload plan --gpus N`, and apply_plan on each rank"
        )


def _described(task: Task) -> tuple[Mapping[str, Any], float]:
    """Return what the planner is told of the model, and by how much its bytes may be wrong."""
    _, tokens = _size(task.batch)
    config = _config(task.model)
    try:
        profile = profile_batch(task.model, task.batch, task.loss, tokens=tokens)
    except Exception as error:  # the model's own code runs: it may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0].partition("; expected")[0]
        if config is None:
            raise FitError(
                f"{type(task.model).__name__} cannot be traced: {said}; {_least(task.model)}; expected a forward "
                "whose operations follow from shapes, with blocks in an nn.ModuleList; try loss=, or apply_plan with "
                "a plan of `offload plan` by sizes"
            ) from error
        _LOG.warning(
            "%s cannot be traced: %s; the plan rests on a formula, which is within %d %% of most models",
            type(task.model).__name__,
            said,
            round(100 * _FORMULA_ERROR),
        )
        return config, _FORMULA_ERROR
    if not task.device.is_accelerator:
        # The twin rounds nothing.
        profile["weights_allocated_bytes"] = profile["weights_bytes"]
    if config is not None:
        profile["config"] = config
    return profile, 0.0


def _config(model: nn.Module) -> dict[str, Any] | None:
    """Return the entries of a Hugging Face model's config.json, or None for another model."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    entries = json.loads(to_json(use_diff=False))
    return entries if isinstance(entries, dict) and isinstance(entries.get("model_type"), str) else None


def _least(model: nn.Module) -> str:
    """Say what is known without a trace."""
    params = list({param.untyped_storage()._cdata: param for param in model.parameters()}.values())
    weights = sum(param.nbytes for param in params)
    trained = [param for param in params if param.requires_grad]
    states = sum(param.nbytes + (8 if param.element_size() >= 4 else 12) * param.numel() for param in trained)
    return (
        f"its weights take {weights / 2**30:.2f} GiB, its gradients and states {states / 2**30:.2f} GiB, and what "
        "forward saves comes on top, by no known amount"
    )


def _size(batch: Any) -> tuple[int, int]:
    """Return sequences and tokens of `batch`, by its integers if there are any, else by its first tensor."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() >= 2]
    if not tensors:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor; expected its sequences; try the batch that is "
            "trained on"
        )
    shape = (ids or tensors)[0].shape
    return shape[0], shape[1] if len(shape) > 1 else 1


def _check_budgets(**budgets: Budget) -> None:
    for name, given in budgets.items():
        is_bytes = isinstance(given, int) and not isinstance(given, bool) and given > 0
        if given != "auto" and not is_bytes:
            raise ValueError(f"{name} is {given!r}; expected bytes above zero, or 'auto'; try 'auto'")


def _budgets(task: Task, gpu_budget: Budget, host_budget: Budget) -> tuple[int, int]:
    """Return the bytes that may be used on the device, weights included, and on the host."""
    device, there = task.device, available_bytes()
    if device.allocator is None:
        # The twin's two tiers are one memory.
        free_bytes = there = there // 2
    else:
        free_bytes = device.allocator.free_bytes() + device.allocator.live_bytes
    budget = free_bytes if gpu_budget == "auto" else min(gpu_budget, free_bytes)
    if host_budget != "auto":
        return budget, host_budget
    # Weights that are on the host are so wherever a plan puts them there.
    held = sum(param.nbytes for param in task.model.parameters()) if task.on_host else 0
    return budget, round(_HOST_SHARE * there) + held
