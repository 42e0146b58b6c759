# SPDX-License-Identifier: Apache-2.0
"""The checks of `fit`'s arguments, before anything is traced or moved; each refusal is one sentence.

Explained in docs/fitting.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from reference_impl.device import Device
from reference_impl.fitting.planner import Plan
from reference_impl.fitting.trial import Loss
from reference_impl.optimizers.checks import check_param
from reference_impl.verification.apply import Given, check_planned_for, optimizers_in
from reference_impl.verification.plan_document import check_predicts, execute_section, read_document
from reference_impl.verification.trace import check_callable_with, own_loss, tensors_in

Budget = int | Literal["auto"]


class FitError(ValueError):
    """No offload of this package trains the model here, or nobody can say which: the sentence says why."""


def planned(plan: Plan | str | Path, model: nn.Module) -> Plan:
    """Return `plan` as a document. Raises ValueError for one that predicts nothing, or is for another model."""
    execute_section(plan)
    document = dict(read_document(plan))
    if "recommendation" not in document:
        raise ValueError(
            "the plan predicts nothing; expected one of `offload plan --format json`; try no plan"
        )
    check_predicts(document)
    check_planned_for(document, model)
    return document


def check_one_rank(model: nn.Module) -> None:
    """Raise ValueError for several training ranks, or for a sharded `model`, even over one rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1 and not any(isinstance(param, DTensor) for param in model.parameters()):
        return
    raise ValueError(
        f"fit on {ranks} rank{'s' * (ranks > 1)} with {type(model).__name__}; expected one rank and a model that is "
        "not sharded, because each rank would settle on a plan of its own; try offload plan --framework pytorch --gpus "
        f"{max(ranks, 2)} --format json > plan.json, for Muon with --overrides optimizer=muon, then "
        'apply_plan(model, optimizer, "plan.json") on every rank'
    )


def one_device(model: nn.Module, wanted: torch.device | str | None) -> tuple[Device, torch.device]:
    """Return the device of `model`'s run (`wanted`, or its own), and the device of its weights.

    Raises ValueError for a model on no device or several, without values, or with nothing to train.
    """
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
    if there.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on meta, where weights have no values; expected some to train; try "
            'model.to_empty(device="cpu") and its weights, or from_pretrained'
        )
    on = Device.of(there if wanted is None else wanted)
    if there.type != "cpu" and there != on.torch_device:
        raise ValueError(
            f"device is {wanted}, and the model's parameters are on {there}; expected them there or on the CPU; try "
            f"device={str(there)!r}"
        )
    return on, there


def check_optimizer(given: Given, model: nn.Module) -> None:
    """Raise ValueError for anything but AdamW, Muon or one of each, of parameters of `model`."""
    listed = optimizers_in(given)
    kinds = [type(each) for each in listed]
    if not listed or len(set(kinds)) < len(kinds) or not set(kinds) <= {torch.optim.AdamW, torch.optim.Muon}:
        raise ValueError(
            "fit offloads the states of AdamW and of Muon; got "
            f"{', '.join(kind.__name__ for kind in kinds) or 'no optimizer'}; expected torch.optim.AdamW, "
            "torch.optim.Muon or a list with one of each; try torch.optim.AdamW(model.parameters())"
        )
    own = set(model.parameters())
    trained = [param for each in listed for group in each.param_groups for param in group["params"]]
    for param in trained:
        check_param(param)
    others = [param for param in trained if param not in own]
    if others:
        raise ValueError(
            f"the optimizer has {len(others)} parameters that {type(model).__name__} has not, one of shape "
            f"{tuple(others[0].shape)}; expected the model's own; try torch.optim.AdamW(model.parameters()) once the "
            "model is final"
        )


def matrices_of(given: Given) -> list[tuple[int, int, int]]:
    """Return the matrices that Muon updates, as rows, columns and how many of each size."""
    found: Counter[tuple[int, int]] = Counter()
    for each in optimizers_in(given):
        for group in each.param_groups if type(each) is torch.optim.Muon else ():
            for param in group["params"]:
                found[param.shape[-2], param.shape[-1]] += prod(param.shape[:-2]) * param.requires_grad
    return [(rows, columns, count) for (rows, columns), count in found.items() if count]


def losses_of(given: Loss | Sequence[Loss] | None) -> list[Loss]:
    """Return the losses to choose from. Raises ValueError where there is none, or one cannot be called."""
    if given is None:
        return [own_loss]
    losses = list(given) if isinstance(given, Sequence) else [given]
    if not losses or not all(callable(each) for each in losses):
        raise ValueError(
            f"loss is {given!r}; expected loss(model, batch), or a list of several; try lambda model, batch: "
            "model(**batch).loss"
        )
    return losses


def scalar(loss: Loss) -> Loss:
    """Return `loss` with a check of its result, which raises FitError for anything but one number to minimise."""

    def checked(model: nn.Module, batch: Any) -> torch.Tensor:
        found: object = loss(model, batch)
        if not isinstance(found, torch.Tensor):
            returned = type(found).__name__
        elif found.numel() != 1:
            returned = f"a tensor of shape {tuple(found.shape)}"
        elif not found.requires_grad:
            returned = "a tensor that requires no gradient"
        else:
            return found
        raise FitError(
            f"the loss returned {returned}; expected a scalar tensor that backward() starts from; try its mean"
        )

    return checked


def check_batch(batch: Any, device: Device, *, calls_itself: bool) -> None:
    """Raise ValueError for a batch elsewhere than on `device`, or in a form that no model call takes."""
    if calls_itself:
        check_callable_with(batch)
    for leaf in tensors_in(batch):
        if leaf.device != device.torch_device:
            raise ValueError(
                f"the batch is on {leaf.device}, and the model runs on {device.torch_device}; expected both there; try "
                f"batch.to({str(device.torch_device)!r})"
            )


def check_budgets(**budgets: Budget) -> None:
    """Raise ValueError for a budget that is no number of bytes."""
    for name, given in budgets.items():
        is_bytes = isinstance(given, int) and not isinstance(given, bool) and given > 0
        if given != "auto" and not is_bytes:
            raise ValueError(f"{name} is {given!r}; expected bytes above zero, or 'auto'; try 'auto'")


def size(batch: Any) -> tuple[int, int]:
    """Return sequences and tokens of `batch`, by its integers if there are any, else by its first tensor."""
    tensors = [leaf for leaf in tensors_in(batch) if leaf.dim()]
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() >= 2]
    if not tensors:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor; expected its sequences; try the batch that is "
            "trained on"
        )
    shape = (ids or tensors)[0].shape
    return shape[0], shape[1] if len(shape) > 1 else 1
