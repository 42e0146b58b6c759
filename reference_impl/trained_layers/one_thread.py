# SPDX-License-Identifier: Apache-2.0
"""The one thread that runs a model with streamed shards.

FSDP2 keeps gathered parameters on the modules and in one state. Two threads that run one model, or a save by one
between the gathers of the other, leave torch's own code with wrong or missing weights. On several ranks their gathers
also pair by chance. So one thread runs the model, on each rank the same, and every other is refused before FSDP2 has
heard of it. Apart because the streamer is at its size, and knows nothing else of threads.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reference_impl.memory.closing import register_first, register_undoably

_NO_BACKWARD = -1


class OneThread:
    """First the thread that makes this; one that trains takes its place until the model has run, or after its end."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._has_run = False

    def check(self, doing: str, *, trains: bool = False, runs: bool = False) -> None:
        """Raise RuntimeError where another thread is the one.

        `doing` is the work of the calling thread. Only one that `trains`, or loads weights to do so, becomes the one,
        and only a run of the model (`runs`) makes it stay.
        """
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            # A backward has threads of its own, whose forward was checked.
            return
        me = threading.current_thread()
        if me is not self._thread:
            if not (trains and not self._has_run) and self._thread.is_alive():
                raise RuntimeError(
                    f"thread {me.name!r} {doing}, and thread {self._thread.name!r} is the one that runs it; expected "
                    "one thread, because FSDP2 gathers for one at a time, and ranks have to gather in the same order; "
                    f"try it in {self._thread.name!r} between two steps, or let that thread end first; "
                    "optimizer.state_dict() may be called from any thread"
                )
            self._thread, self._has_run = me, False
        self._has_run = self._has_run or runs

    def guard(self, module: nn.Module, undo: list[Callable[[], None]]) -> None:
        """Check each forward of `module` and each of its state_dicts; `undo` gets the call that undoes it."""
        forward = torch.compiler.disable(self._before_forward)
        register_undoably(module.register_forward_pre_hook, forward, undo, prepend=True)
        for register, hooks, hook in (
            (module.register_state_dict_pre_hook, module._state_dict_pre_hooks, self._before_state_dict),
            (module.register_load_state_dict_pre_hook, module._load_state_dict_pre_hooks, self._before_load),
        ):
            # In front of FSDP2's resharding hooks.
            register_first(register, hooks, hook, undo)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.check("runs a model whose shards stream", trains=torch.is_grad_enabled(), runs=True)

    def _before_state_dict(self, *_: Any) -> None:
        self.check("calls state_dict() of a model whose shards stream")

    def _before_load(self, *_: Any) -> None:
        self.check("calls load_state_dict() of a model whose shards stream", trains=True)
