# SPDX-License-Identifier: Apache-2.0
"""The callback by which Transformers' `Trainer` says when its model is final and when other code reads weights.

Explained in docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.parked_generation import ParkedGeneration
from reference_impl.optimizers import HybridDeviceOptimizer

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

# The events of a trainer between a step and the next forward.
_AFTER_STEP = (
    *("on_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_predict", "on_save"),
    *("on_epoch_end", "on_epoch_begin", "on_step_begin"),
)


def callback_of(
    handle: Offloading,
    events_that_read: Callable[[], Iterable[str]],
    wrapped: Callable[[], nn.Module | None],
    generation: ParkedGeneration | None = None,
) -> TrainerCallback:
    """Return the callback of `handle`; `events_that_read` and the `wrapped` model are asked when training begins.

    `generation` begins and ends with training.
    """
    from transformers import TrainerCallback

    class OffloadCallback(TrainerCallback):  # type: ignore[misc]
        """Puts `offloading` on the model when training begins, and takes it off when it ends."""

        offloading = handle

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Take over the optimizer that the trainer has made, and attach: now the model is final."""
            if handle.wanted.optimizer is not None:
                _take_over(kwargs["optimizer"], handle)
            for event in events_that_read():
                setattr(self, event, self.finish_weights)
            gradient_state = kwargs["optimizer"].gradient_state
            handle.attach(
                kwargs["model"],
                wrapped=wrapped(),
                accumulating=lambda: not gradient_state.sync_gradients,
            )
            if generation is not None:
                generation.begin(kwargs["model"], kwargs["optimizer"])

        def finish_weights(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Let later callbacks read weights as they are."""
            if handle.optimizer is not None:
                handle.optimizer.synchronize()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Leave the model."""
            if generation is not None:
                generation.end()
            handle.detach()

    return OffloadCallback()


def _take_over(optimizer: Any, handle: Offloading) -> None:
    """Have `handle` own the optimizer that the trainer has made and wrapped."""
    while not isinstance(optimizer, HybridDeviceOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, HybridDeviceOptimizer):
        raise ValueError(
            f"the optimizer of offload() was to be made, but the trainer has a {type(optimizer).__name__}; expected "
            "its own create_optimizer; try a trainer that does not replace it, or offload() without optimizer="
        )
    if handle.optimizer not in (None, optimizer):
        handle.optimizer.close()
    handle.optimizer = optimizer


def events_that_read(trainer: Trainer) -> list[str]:
    """Return the events with callbacks beyond Transformers' own: these may read weights on their way.

    TRL hands weights to vLLM between steps.
    """
    from transformers import TrainerCallback

    callbacks = trainer.callback_handler.callbacks
    others = [
        each
        for each in callbacks
        if not type(each).__module__.startswith("transformers.") and not hasattr(each, "offloading")
    ]

    def is_heard(event: str) -> bool:
        own = getattr(TrainerCallback, event)
        return any(event in vars(each) or getattr(type(each), event) is not own for each in others)

    found = [event for event in _AFTER_STEP if is_heard(event)]
    return found + (["on_optimizer_step"] if getattr(trainer.args, "use_vllm", False) else [])
