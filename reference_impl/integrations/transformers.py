# SPDX-License-Identifier: Apache-2.0
"""Offloading in Transformers' and TRL's trainers, with PEFT's adapters or without: one line, or a callback.

The trainer clips, accumulates, schedules, saves and resumes; its arguments are taken from it. Explained in
docs/trainers.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.parked_generation import ParkedGeneration
from reference_impl.integrations.planned import Plan
from reference_impl.integrations.transformers_callback import callback_of, events_that_read
from reference_impl.integrations.transformers_checks import check_trainer, optimizer_in
from reference_impl.integrations.wanted import Options, Wanted
from reference_impl.memory.closing import closed_behind, undo_all

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


def offload(
    trainer: Trainer,
    plan: Plan | None = None,
    *,
    optimizer: bool | str | Options = False,
    activations: str | Options | None = None,
    weights: bool | Options = False,
    park: str | None = None,
) -> Offloading:
    """Have `trainer` offload by a plan or by options, from its next `train()` until `close()` of the handle.

    >>> trainer = SFTTrainer(model, args=args, train_dataset=dataset)
    >>> offload(trainer, optimizer=True, activations="checkpoint")
    >>> trainer.train()

    Outside `train()` the model is as it was, however training has ended. Until `close()` the optimizer and its state
    live on: `trainer` saves, resumes and trains again.

    Args:
        trainer: a built `transformers.Trainer` 5.x, or one of TRL's (`SFTTrainer`, `DPOTrainer`, `GRPOTrainer`).
        plan, optimizer, activations, weights: see `Wanted.of`.
        park: `generate` parks training memory while a trainer of TRL generates (docs/parking.md).

    Raises TypeError for another trainer and ValueError, before anything is changed, for options that do not go
    together: the message names both and gives advice.
    """
    generation = None if park is None else ParkedGeneration(trainer, park)
    parks_alone = generation is not None and plan is None and not (optimizer or activations or weights)
    words = {"optimizer": optimizer, "activations": activations, "weights": weights}
    wanted = Wanted() if parks_alone else Wanted.of(plan, **words)  # type: ignore[arg-type]
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
        trainer.optimizer_cls_and_kwargs = optimizer_in(trainer, wanted.optimizer)
    callback = callback_of(
        handle, lambda: events_that_read(trainer), lambda: trainer.model_wrapped, generation
    )
    # First of all, so that weights are finished for the others.
    trainer.callback_handler.callbacks.insert(0, callback)
    # Exceptions leave `train` without `on_train_end`.
    trainer.train = _detaching(train, handle, generation)

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

    It comes too late for the optimizer. After an exception the model is left at the next `train()`, or by
    `callback.offloading.close()`.
    """
    wanted = Wanted.of(plan, activations=activations, weights=weights)
    if wanted.optimizer is not None:
        raise ValueError(
            "the plan offloads the optimizer, which a trainer makes before it calls back; expected a plan without; try "
            "offload(trainer, plan)"
        )
    return callback_of(Offloading(wanted), tuple, lambda: None)


def _detaching(
    train: Callable[..., Any], handle: Offloading, generation: ParkedGeneration | None
) -> Callable[..., Any]:
    def leave() -> None:
        undo_all([handle.detach, *(() if generation is None else (generation.end,))])

    @functools.wraps(train)
    def run(*args: Any, **kwargs: Any) -> Any:
        with closed_behind(leave):
            return train(*args, **kwargs)

    run.offloading = handle  # type: ignore[attr-defined]
    return run
