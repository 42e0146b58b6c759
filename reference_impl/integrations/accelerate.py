# SPDX-License-Identifier: Apache-2.0
"""Offloading in a loop of Accelerate: one line after `prepare`.

`clip_grad_norm_`, `accumulate`, `save_state` and `load_state` are Accelerate's own. Explained in docs/trainers.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.planned import Plan
from reference_impl.integrations.wanted import Options, Wanted
from reference_impl.memory.closing import close_behind
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.hosted import HostedOptimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

# Engines that shard or own the parameters, and the advice for each.
_ENGINES = {
    "FSDP": "fsdp_version=2 of its plugin",
    "DEEPSPEED": "offload_optimizer in DeepSpeed's own file",
    "MEGATRON_LM": "reference_impl.optimizers.megatron",
}


def offload(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | None = None,
    activations: str | Options | None = None,
    weights: bool | Options = False,
) -> Offloading:
    """Attach a prepared optimizer to its model and offload all else that is named, until `close()` of the handle.

    >>> optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-4)
    >>> model, optimizer, data = accelerator.prepare(model, optimizer, data)
    >>> with offload(accelerator, model, optimizer, activations="checkpoint"):
    ...     train(model, optimizer, data)  # the loop as it was

    Under FSDP2 of Accelerate `accelerate.utils.fsdp2_prepare_model(accelerator, model)` shards the model before the
    optimizer is made; `prepare` leaves both as they are.

    Gradients leave in the last backward of `accelerator.accumulate`. The optimizer stays the caller's: `close()`
    finishes its step and detaches it, and leaves it open.

    Args:
        accelerator: which has prepared both.
        model: as `prepare` has returned it.
        optimizer: likewise; a `HybridDeviceOptimizer` or `OptimizerStateOffloader` in it is attached.
        plan, activations, weights: see `Wanted.of`; of a plan the optimizer is the caller's to make.

    Raises ValueError, before anything is changed, for options that do not go together: the message gives advice.
    """
    kind = accelerator.distributed_type.name
    if kind in _ENGINES and not accelerator.is_fsdp2:
        raise ValueError(
            f"{kind} of Accelerate does not go with offload(); expected one of the two; try: {_ENGINES[kind]}"
        )
    hosted = _hosted(optimizer)
    if accelerator.is_fsdp2 and hosted is not None:
        _check_sharded(hosted)
    given = plan is not None or activations is not None or weights
    wanted = (
        Wanted.of(plan, activations=activations, weights=weights) if given or hosted is None else Wanted()
    )
    if wanted.optimizer is not None and hosted is None:
        options = ", ".join(f"{name}={value!r}" for name, value in wanted.optimizer.items())
        raise ValueError(
            "the plan offloads the optimizer's state; expected an optimizer that does; try "
            f"HybridDeviceOptimizer(params, {options}) in prepare()"
        )
    handle = Offloading(wanted)
    undo = ExitStack()
    try:
        handle.attach(accelerator.unwrap_model(model))
        if hosted is not None:
            # Under DistributedDataParallel gradients leave once they are reduced.
            hosted.attach(model)
            undo.callback(hosted.detach)
        if isinstance(hosted, HybridDeviceOptimizer):
            hosted.accumulate_while(lambda: not accelerator.sync_gradients)
            undo.callback(hosted.accumulate_while, _never)
    except BaseException as error:
        close_behind(error, undo.close)
        close_behind(error, handle.close)
        raise
    handle.on_close = undo.close
    return handle


def _check_sharded(optimizer: HostedOptimizer) -> None:
    """Raise ValueError where `prepare` has sharded the model under the optimizer."""
    given = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if any(param not in optimizer.members for param in given):
        raise ValueError(
            "prepare() has sharded the model and given its optimizer other parameters than those it was made of; "
            "expected an optimizer of sharded parameters; try model = "
            "accelerate.utils.fsdp2_prepare_model(accelerator, model) before the optimizer is made"
        )


def _hosted(optimizer: torch.optim.Optimizer | None) -> HostedOptimizer | None:
    """Return the optimizer that Accelerate has wrapped, if it is one of ours."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, HostedOptimizer) else None


def _never() -> bool:
    return False
