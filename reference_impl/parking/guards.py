# SPDX-License-Identifier: Apache-2.0
"""Refuses uses of parked training before they touch anything.

A parked tensor refuses to be computed with by itself, in Python. The hooks here come first and name the remedy: in
front of a model's forward, of the backward of its result, of an optimizer's step, and of saving and loading
either. Autograd adds to gradients without Python, so while some are parked parameters have hooks, too.

Explained in docs/parking.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reference_impl.memory.closing import register_undoably

Refuse = Callable[[str], None]
BACKWARD = "a backward"


def guard(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    weights: Refuse,
    gradients: Refuse,
    training: Refuse,
    undo: list[Callable[[], None]],
) -> None:
    """Hook `models` and `optimizers`.

    Args:
        weights: bound method, called with the name of the use if weights are needed.
        gradients: the same for weights and gradients.
        training: the same for all of training. No owner is kept alive.
        undo: gets the call that takes each hook off.
    """
    backward = _Guard(gradients, BACKWARD)
    for model in models:
        register_undoably(model.register_forward_hook, _GuardedOutput(backward), undo)
        register_undoably(model.register_forward_pre_hook, _Guard(weights, "forward"), undo, prepend=True)
        register_undoably(
            model.register_state_dict_pre_hook, _Guard(weights, "the model's state_dict()"), undo
        )
        register_undoably(
            # Masters and states of weights that were restored early are still away.
            model.register_load_state_dict_pre_hook,
            _Guard(training, "the model's load_state_dict()"),
            undo,
        )
    for optimizer in optimizers:
        register_undoably(optimizer.register_step_pre_hook, _Guard(training, "the optimizer's step()"), undo)
        save = _Guard(training, "the optimizer's state_dict()")
        register_undoably(optimizer.register_state_dict_pre_hook, save, undo, prepend=True)
        load = _Guard(training, "the optimizer's load_state_dict()")
        register_undoably(optimizer.register_load_state_dict_pre_hook, load, undo, prepend=True)


def guard_gradients(
    models: Sequence[nn.Module], gradients: Refuse, *, undo: list[Callable[[], None]]
) -> None:
    """Have a backward call `gradients` before it adds to the gradient of any parameter of `models`."""
    hook = _Guard(gradients, BACKWARD)
    for param in {id(each): each for model in models for each in model.parameters()}.values():
        if param.requires_grad:
            register_undoably(param.register_hook, hook, undo)


class _Guard:
    """A hook that asks before each `use`; a copy or a pickle of its module has one that does nothing."""

    # On a tensor that is pickled it is left out.
    __torch_unserializable__ = True

    def __init__(self, refuse: Refuse, use: str) -> None:
        self._refuse, self._use = weakref.WeakMethod(refuse), use

    def __call__(self, *_: Any) -> None:
        """Raise where it may not happen."""
        refuse = self._refuse()
        if refuse is not None:
            refuse(self._use)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the standard library's function that takes anything and does nothing."""
        return getattr, (nullcontext(), "__exit__")


class _GuardedOutput:
    """A hook behind a forward: the backward of its result calls `hook` first."""

    def __init__(self, hook: _Guard) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook the tensors of `output` from which a backward may come."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    _hook_first(each, self._hook)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the standard library's function that takes anything and does nothing."""
        return self._hook.__reduce__()


def _hook_first(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Have a backward call `hook` before the other hooks of `tensor`: FSDP2's hooks gather shards."""
    tensor.register_hook(hook)
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    for before in list(hooks)[:-1]:
        # Autograd goes by when they were put in, whatever `move_to_end` says.
        hooks[before] = hooks.pop(before)
