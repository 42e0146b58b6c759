# SPDX-License-Identifier: Apache-2.0
"""Torch's stacks of a thread: hooks of saved tensors, and modes that hear of each operation.

Torch's context managers push and pop them between bytecodes of Python, where a signal's handler may raise. A hook or
mode that stays on the stack hears of all later work of the thread, closed or not. So each use of such a context has one
of these around it.

Explained in docs/reliability.md.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode


class stacks_as_before:  # noqa: N801 (used like a function, as contextlib's)
    """Leave both stacks as they were: take off the entries that an interrupt has left there."""

    __slots__ = ("_hooks", "_modes")

    def __enter__(self) -> None:
        self._hooks, self._modes = _top_hooks(), torch._C._len_torch_dispatch_stack()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        while torch._C._len_torch_dispatch_stack() > self._modes:
            _pop_mode()
        while (top := _top_hooks()) is not None and top != self._hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
