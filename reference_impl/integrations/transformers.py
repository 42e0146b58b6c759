"""Offloading in Transformers' `Trainer` and those of TRL, with PEFT's adapters or without: one line, or a callback.

The trainer clips, accumulates, schedules, saves and resumes; its arguments are taken from it. Explained in
docs/trainers.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.planned import Plan
from reference_impl.integrations.transformers_checks import check_trainer, optimizer_arguments
from reference_impl.integrations.wanted import Options, Wanted
from reference_impl.memory.closing import close_behind
from reference_impl.optimizers import HybridDeviceOptimizer

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


def offload(
    trainer: Trainer,
    plan: Plan | None = None,
    *,
    optimizer: bool | str | Options = False,
    activations: str | Options | None = None,
    weights: bool | Options = False,
) -> Offloading:
    """Have `trainer` offload what a plan or the words say, from its next `train()` until `close()` of the handle.

    >>> trainer = SFTTrainer(model, args=args, train_dataset=dataset)
    >>> offload(trainer, optimizer=True, activations="checkpoint")
    >>> trainer.train()

    Outside `train()` the model is as it was, however training has ended. Until `close()` the optimizer and its state
    live on: `trainer` saves, resumes and trains again.

    Args:
        trainer: a built `transformers.Trainer` 5.x, or one of TRL's (`SFTTrainer`, `DPOTrainer`, `GRPOTrainer`).
        plan, optimizer, activations, weights: see `Wanted.of`.

    Raises TypeError for another trainer and ValueError, before anything is changed, for what does not go together:
    the message names both and what to do.
    """
    wanted = Wanted.of(plan, optimizer=optimizer, activations=activations, weights=weights)
    check_trainer(trainer, wanted)
    handle = Offloading(wanted)
    if any(
        getattr(callback, "offloading", None) is not None for callback in trainer.callback_handler.callbacks
    ):
        raise ValueError(
            "this trainer has an offloader already; expected one at a time; try close() of the first"
        )
    handle.check(trainer.model)
    before, train = trainer.optimizer_cls_and_kwargs, trainer.train
    if wanted.optimizer is not None:
        trainer.optimizer_cls_and_kwargs = (
            HybridDeviceOptimizer,
            optimizer_arguments(trainer, wanted.optimizer),
        )
    callback = _callback(handle)
    trainer.add_callback(callback)
    # Exceptions leave `train` without `on_train_end`.
    trainer.train = _detaching(train, handle)

    def give_back() -> None:
        trainer.remove_callback(callback)
        trainer.optimizer_cls_and_kwargs = before
        if getattr(trainer.train, "offloading", None) is handle:
            del trainer.__dict__["train"]
        if wanted.optimizer is not None:
            trainer.optimizer = None

    handle.on_close = give_back
    return handle


def offload_callback(
    plan: Plan | None = None, *, activations: str | Options | None = None, weights: bool | Options = False
) -> TrainerCallback:
    """Return a callback that offloads activations and frozen weights while a trainer trains, for `callbacks=[...]`.

    It comes too late for the optimizer; a `HybridDeviceOptimizer` that the trainer got by `optimizer_cls_and_kwargs` it
    attaches. After an exception the model is left at the next `train()`, or by `callback.offloading.close()`.
    """
    return _callback(Offloading(Wanted.of(plan, activations=activations, weights=weights)))


def _callback(handle: Offloading) -> TrainerCallback:
    from transformers import TrainerCallback

    class OffloadCallback(TrainerCallback):  # type: ignore[misc]
        """Puts `offloading` on the model when training begins, and takes it off when it ends."""

        offloading = handle

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Take over the trainer's optimizer, if it is ours, and attach: now the model is final."""
            optimizer = _without_wrappers(kwargs["optimizer"])
            if isinstance(optimizer, HybridDeviceOptimizer):
                if handle.optimizer not in (None, optimizer):
                    handle.optimizer.close()
                handle.optimizer = optimizer
            elif handle.wanted.optimizer is not None:
                raise ValueError(
                    f"the optimizer is to be offloaded, but the trainer has made a {type(optimizer).__name__}; "
                    "expected the trainer to make it; try offload(trainer, ...) before train(), and no callback"
                )
            gradient_state = getattr(kwargs["optimizer"], "gradient_state", None)
            asks = None if gradient_state is None else lambda: not gradient_state.sync_gradients
            handle.attach(kwargs["model"], accumulating=asks)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Leave the model."""
            handle.detach()

    return OffloadCallback()


def _detaching(train: Callable[..., Any], handle: Offloading) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = train(*args, **kwargs)
        except BaseException as error:
            close_behind(error, handle.detach)
            raise
        handle.detach()
        return result

    run.offloading = handle  # type: ignore[attr-defined]
    return run


def _without_wrappers(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while not isinstance(optimizer, HybridDeviceOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
