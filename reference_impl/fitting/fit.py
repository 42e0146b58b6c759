# SPDX-License-Identifier: Apache-2.0
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

import gc
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from offload_arithmetic.sizes import FORMULA_ERROR
from reference_impl.activations.attach import refuse_checkpointing
from reference_impl.fitting import checks
from reference_impl.fitting.before import Before, RandomState
from reference_impl.fitting.checks import Budget, FitError
from reference_impl.fitting.planner import Plan, Planner, RefusedPlanError, complete, formula_parameters
from reference_impl.fitting.progress import Progress, Say
from reference_impl.fitting.search import Search, fastest
from reference_impl.fitting.trial import Loss, Task
from reference_impl.memory.closing import ClosedAtExit, close_behind, undo_all
from reference_impl.memory.host import available_bytes
from reference_impl.memory.shown import Shown, counted, size
from reference_impl.optimizers.checks import norm_of
from reference_impl.verification.apply import AppliedPlan, Given, optimizers_in
from reference_impl.verification.hugging_face import without_caches
from reference_impl.verification.trace import NoLossError
from reference_impl.verification.trace_profile import profile_batch

_LOG = logging.getLogger(__name__)

# The share of the host's memory for a plan; the data loader, torch and the kernel allocate from the rest.
_HOST_SHARE = 0.9
# The largest error of the formula's parameter count with which a plan is worth a trial.
_MOST_FORMULA_ERROR = 0.5


class Fitted(Shown, ClosedAtExit):
    """A model under the settled plan; a context manager.

    `optimizer` is the one to step, and `loss(model, batch)` the fitted loss: of several, the fastest.
    `gathered()` does the same as `AppliedPlan.gathered()`. `plan` is the document of `schema/plan.schema.json`, with
    the measurements under `fitted`; `apply_plan` takes it. `summary` is one line.
    """

    def __init__(
        self, applied: AppliedPlan, loss: Loss, plan: Plan, summary: str, undo: list[Callable[[], None]]
    ) -> None:
        self.optimizer = applied.optimizer
        self.gathered = applied.gathered
        self.loss = loss
        self.plan = plan
        self.summary = summary
        self._undo = undo

    def _facts(self) -> Mapping[str, str]:
        found = self.plan["fitted"]
        return {
            "plan": self.plan["recommendation"]["option"]["label"],
            "peak on the device": f"{size(found['peak_device_bytes'])} of {size(found['gpu_budget_bytes'])}",
            "host memory": size(found["peak_host_bytes"]),
            "step": f"{found['step_s']:.3f} s",
            "tried": f"{counted(found['plans'], 'plan')} in {counted(found['steps'], 'step')}",
        }

    def close(self) -> None:
        """Leave the model as it was and where it was, and give the host memory back.

        Every step of closing is tried, and the first error is raised at the end. A second call repeats the steps that
        failed.
        """
        undo_all(self._undo)

    def __enter__(self) -> Self:
        """Return this; the plan is in force already."""
        return self


def fit(
    model: nn.Module,
    optimizer: Given,
    batch: Any,
    loss: Loss | Sequence[Loss] | None = None,
    *,
    gpu_budget: Budget = "auto",
    host_budget: Budget = "auto",
    pinned_budget: Budget = "auto",
    max_grad_norm: float | None = None,
    plan: Plan | str | Path | None = None,
    allow_other_numerics: bool = False,
    device: torch.device | str | None = None,
    progress: bool | Say = True,
) -> Fitted:
    """Find the plan that trains `model` here and apply it; weights and random state do not change.

    Traces a step of the model, asks the planner, and tries its plan for two steps on `batch`; where the true peak or
    the lack of memory says so, it tries a corrected one. The batch should be the largest that will be trained on.

    Args:
        model: on its device, or on the CPU with `device`, with its blocks in an `nn.ModuleList`.
        optimizer: a `torch.optim.AdamW`, a `torch.optim.Muon` or a list of both; the fitted optimizer takes their
            groups and states over.
        batch: keyword arguments as a mapping, or one positional argument.
        loss: `loss(model, batch)` returns a scalar tensor; by default it is the attribute `loss` of the model's output.
            Several losses compute the same number with other kernels (all logits at once, or in chunks); each is
            tried, and the fastest within the budget is `fitted.loss`.
        gpu_budget: bytes that torch's allocator may reserve; by default the device's free memory.
        host_budget: bytes of host memory for offloaded tensors; by default nine tenths of the available memory.
        pinned_budget: bytes of it that may be page-locked; by default the limit found by `offload probe`.
        max_grad_norm: clip the global norm exactly, in the optimizer; None or 0 clips nothing.
        plan: the plan to try first, a document of `offload plan --format json` or its path.
        allow_other_numerics: let a plan round optimizer states; `fitted.plan` then says so.
        device: the device of the batch and the run, for a model on the CPU; it may be larger than the device. Its
            weights are on the CPU again after `close()`.
        progress: print each step on standard error, on a terminal in one line that changes. False prints nothing; a
            function is called with each line instead.

    Raises FitError if nothing fits, for an untraceable model without a known config, or for a loss that is no scalar;
    ValueError for another optimizer or another model's, a model or batch without values or elsewhere, an argument out
    of range, several ranks and a sharded model; HostMemoryError without room on the host for a copy of the trained
    weights. The model and the optimizer are then as they were.
    """
    checks.check_one_rank(model)
    on, starts_on = checks.one_device(model, device)
    # Whether anything is computed again, the plan decides.
    refuse_checkpointing(model, "fit, where its plan says so,")
    checks.check_optimizer(optimizer, model)
    checks.check_budgets(gpu_budget=gpu_budget, host_budget=host_budget, pinned_budget=pinned_budget)
    checks.check_batch(batch, on, calls_itself=loss is None)
    losses = checks.losses_of(loss)
    first = None if plan is None else complete(checks.planned(plan, model))
    tasks = [
        Task(
            model=model,
            optimizer=optimizer,
            batch=batch,
            loss=checks.scalar(each),
            max_grad_norm=norm_of(max_grad_norm),
            device=on,
            on_host=device is not None and starts_on.type == "cpu",
        )
        for each in losses
    ]
    model.zero_grad(set_to_none=True)
    shown = Progress(progress)
    say = shown.say
    undo: list[Callable[[], None]] = [without_caches(model)]
    try:
        random_state = RandomState(on)
        try:
            say(f"tracing a step of {type(model).__name__}")
            described = [_described(task) for task in tasks]
        finally:
            # The trace runs the model's own code, which may take random numbers of any generator.
            random_state.restore()
        before = Before(model, optimizer, on, batch)
        try:
            budget_bytes, host_bytes = _budgets(tasks[0], gpu_budget, host_budget)
            sequences, tokens = checks.size(batch)
            other_bytes = tasks[0].other_bytes()
            searches = [
                Search(
                    task,
                    before,
                    Planner(
                        model_described,
                        sequences=sequences,
                        tokens=tokens,
                        host_bytes=host_bytes,
                        pinned_bytes=None if pinned_budget == "auto" else pinned_budget,
                        allow_other_numerics=allow_other_numerics,
                        gradients_wait=on.is_accelerator,
                        muon=bool(checks.matrices_of(optimizer)),
                    ),
                    budget_bytes,
                    other_bytes=other_bytes,
                    error_share=error_share,
                    first=first,
                    say=say,
                )
                for task, (model_described, error_share) in zip(tasks, described, strict=True)
            ]
            chosen, best = fastest(searches)
            task = tasks[chosen]
            if on.allocator is not None:
                # As before each trial: the plan's buffers would split the large blocks that the last one has left in
                # the allocator's cache, and a loss of 2.3 GiB then found no room in 7 GiB of rests (Qwen3-4B, 40 GiB).
                on.allocator.free_bytes()
            if gpu_budget != "auto" and on.allocator is not None:
                # A budget that the caller has set limits the allocator until the end.
                on.allocator.limit(budget_bytes)
                undo.append(partial(on.allocator.limit, None))
            undo.append(task.put_back)
            task.place(best.plan)
            applied = task.apply(best.plan)
            undo.append(applied.close)
        except BaseException as error:
            before.restore()
            before.give_back()
            if isinstance(error, RefusedPlanError):
                # Of a toy's memory GiB say nothing.
                budget = (
                    f"{budget_bytes / 2**30:.2f} GiB" if budget_bytes >= 2**27 else f"{budget_bytes:,} bytes"
                )
                raise FitError(f"nothing fits {budget}: {error}") from None
            raise
    except BaseException as error:
        close_behind(error, lambda: undo_all(undo))
        raise
    finally:
        shown.end()
    for each in optimizers_in(optimizer):
        each.state.clear()
    measured, summary = best.measured(budget_bytes), best.summary(budget_bytes)
    if len(losses) > 1:
        measured["loss"] = chosen
        summary += f"; loss {chosen} of those given"
    # A formula may have counted others; `apply_plan` compares them.
    described_as = best.plan.get("model", {}) | {"parameters": sum(p.numel() for p in model.parameters())}
    plan_of_model = best.plan | {"fitted": measured, "model": described_as}
    fitted = Fitted(applied, losses[chosen], plan_of_model, summary, undo)
    _LOG.info(fitted.summary)
    return fitted


def _described(task: Task) -> tuple[Mapping[str, Any], float]:
    """Return the model's description for the planner, and by how much its bytes may be wrong."""
    _, tokens = checks.size(task.batch)
    config, matrices = _config(task.model), checks.matrices_of(task.optimizer)
    try:
        profile = profile_batch(
            task.model, task.batch, task.loss, tokens=tokens, on_cuda=task.device.is_accelerator
        )
    except (FitError, NoLossError):
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        said = (str(error).splitlines() or [type(error).__name__])[0].partition("; expected")[0]
        off = math.inf if config is None else _formula_error(task.model, config)
        if config is None or off > _MOST_FORMULA_ERROR:
            raise FitError(
                f"{type(task.model).__name__} cannot be traced: {said}; {_least(task.model)}; expected a forward "
                "whose operations follow from shapes, with blocks in an nn.ModuleList, or a decoder, for its "
                "formula; try loss=, or apply_plan with a plan of `offload plan` by sizes"
            ) from error
        _LOG.warning(
            "%s cannot be traced: %s; the plan rests on a formula for decoders, which may be off by %d %%",
            type(task.model).__name__,
            said,
            round(100 * off),
        )
        return config, off
    if not task.device.is_accelerator:
        # The twin rounds nothing.
        profile["weights_allocated_bytes"] = profile["weights_bytes"]
    if config is not None:
        profile["config"] = config
    if matrices:
        profile["matrices"] = matrices
    return profile, 0.0


def _config(model: nn.Module) -> dict[str, Any] | None:
    """Return the entries of a Hugging Face model's config.json, or None for another model."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    entries = json.loads(to_json(use_diff=False))
    return entries if isinstance(entries, dict) and isinstance(entries.get("model_type"), str) else None


def _formula_error(model: nn.Module, config: Mapping[str, Any]) -> float:
    """Return by how much the formula for this config.json may be wrong, infinity where there is none.

    The formula counts a decoder; it does not know parts that a model has beside one, or lacks.
    """
    counted = formula_parameters(config)
    if not counted:
        return math.inf
    there = sum(param.numel() for param in _distinct(model))
    return max(FORMULA_ERROR, abs(there / counted - 1))


def _distinct(model: nn.Module) -> list[nn.Parameter]:
    return list({param.untyped_storage()._cdata: param for param in model.parameters()}.values())


def _least(model: nn.Module) -> str:
    """Describe the model as far as it is known without a trace."""
    params = _distinct(model)
    weights = sum(param.nbytes for param in params)
    trained = [param for param in params if param.requires_grad]
    states = sum(param.nbytes + (8 if param.element_size() >= 4 else 12) * param.numel() for param in trained)
    return (
        f"its weights take {weights / 2**30:.2f} GiB, its gradients and states {states / 2**30:.2f} GiB, and the "
        "tensors that forward saves come on top, by no known amount"
    )


def _budgets(task: Task, gpu_budget: Budget, host_budget: Budget) -> tuple[int, int]:
    """Return the bytes that may be used on the device, weights included, and on the host."""
    # Objects that are closed and dropped may still wait for the garbage collector.
    gc.collect()
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
    weights_bytes = sum(param.nbytes for param in task.model.parameters()) if task.on_host else 0
    return budget, round(_HOST_SHARE * there) + weights_bytes
