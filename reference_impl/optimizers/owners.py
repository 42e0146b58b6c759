# SPDX-License-Identifier: Apache-2.0
"""The open optimizer of each parameter: never two, and one may take the place of another without states.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from reference_impl.memory.closing import register_undoably
from reference_impl.optimizers import checks
from reference_impl.optimizers.engine import Engine

# Engines of all uncollected optimizers; an engine has its optimizer, and would keep it here for ever.
_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def note_owner(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Note that `optimizer` trains the members of its `engine` until the engine is closed."""
    _engines[optimizer] = weakref.ref(engine)


def _living() -> Iterator[Engine]:
    """Yield the engines of all optimizers."""
    return (engine for each in list(_engines.values()) if (engine := each()) is not None)


def check_untrained(params: Iterable[torch.Tensor], *, but_by: Engine | None = None) -> None:
    """Raise ValueError for parameters that an open optimizer trains, `but_by` the one with this engine."""
    checks.check_unshared(
        list(params),
        lambda param: any(
            param in each.members for each in _living() if each is not but_by and not each.is_closed
        ),
    )


def take_place(
    taker: torch.optim.Optimizer, given: torch.optim.Optimizer, undo: list[Callable[[], None]]
) -> None:
    """Let `given` refuse calls that need states, until `taker` is closed or `undo` is called."""
    here, stepped, name = weakref.ref(taker), weakref.ref(given), type(given).__name__

    def refuse(*_: Any) -> None:
        found = here()
        engine = None if found is None else _engines[found]()
        if engine is not None and not engine.is_closed:
            raise checks.has_no_states(name, type(found).__name__)

    def note_step(*_: Any) -> None:
        # Schedulers ask the one that they were made for whether it has been stepped.
        if (optimizer := stepped()) is not None:
            vars(optimizer)["_opt_called"] = True

    for register in (
        given.register_step_pre_hook,
        given.register_state_dict_pre_hook,
        given.register_load_state_dict_pre_hook,
    ):
        register_undoably(register, refuse, undo)
    taker.register_step_post_hook(note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Have masters follow another optimizer's writes to weights: fused ones write past autograd's counter."""
    if not _engines or optimizer in _engines:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for each in _living():
        for member in (each.members[param] for param in stepped if param in each.members):
            member.version = -1


register_optimizer_step_post_hook(_note_step)
