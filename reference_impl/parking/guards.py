"""What training may not do while it is parked, refused before it touches anything.

A parked tensor refuses to be computed with by itself. The hooks here come first and name the remedy: in front of a
model's forward, in front of an optimizer's step, and in front of saving and loading either.

Explained in docs/parking.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from reference_impl.memory.closing import register_undoably

Refuse = Callable[[str], None]


def guard(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    weights: Refuse,
    training: Refuse,
    undo: list[Callable[[], None]],
) -> None:
    """Hook `models` and `optimizers`.

    Args:
        weights: bound method that is called with what is about to happen where weights are needed.
        training: the same where all of training is needed. Neither owner is kept alive.
        undo: gets what takes each hook off.
    """

    for model in models:
        register_undoably(model.register_forward_pre_hook, _Guard(weights, "forward"), undo, prepend=True)
        register_undoably(
            model.register_state_dict_pre_hook, _Guard(weights, "the model's state_dict()"), undo
        )
        register_undoably(
            model.register_load_state_dict_pre_hook, _Guard(weights, "the model's load_state_dict()"), undo
        )
    for optimizer in optimizers:
        register_undoably(optimizer.register_step_pre_hook, _Guard(training, "the optimizer's step()"), undo)
        save = _Guard(training, "the optimizer's state_dict()")
        register_undoably(optimizer.register_state_dict_pre_hook, save, undo, prepend=True)
        load = _Guard(training, "the optimizer's load_state_dict()")
        register_undoably(optimizer.register_load_state_dict_pre_hook, load, undo, prepend=True)


class _Guard:
    """A hook that asks before `what` happens; a copy or a pickle of what it hooks has one that does nothing."""

    def __init__(self, refuse: Refuse, what: str) -> None:
        self._refuse, self._what = weakref.WeakMethod(refuse), what

    def __call__(self, *_: Any) -> None:
        """Raise where it may not happen."""
        refuse = self._refuse()
        if refuse is not None:
            refuse(self._what)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the standard library's function that takes anything and does nothing."""
        return getattr, (nullcontext(), "__exit__")
