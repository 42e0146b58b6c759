# SPDX-License-Identifier: Apache-2.0
"""torch.func's transforms and forward-mode derivatives: whether one runs, and how to work outside of it.

Inside, tensors are wrapped: they have no storage to move, and captured tensors may not be written in place. Torch
refuses saved-tensor hooks, or these read tangents as if they were values.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ParamSpec

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_P = ParamSpec("_P")

_NAMES = {
    "Vmap": "torch.func.vmap",
    "Grad": "torch.func.grad (vjp, jacrev, hessian)",
    "Jvp": "torch.func.jvp (jacfwd, hessian)",
    "Functionalize": "torch.func.functionalize",
}


def running_transform() -> str | None:
    """Return the name of the calling thread's innermost transform, None outside of all."""
    innermost = _functorch.peek_interpreter_stack()
    if innermost is not None:
        return _NAMES.get(innermost.key().name, "a transform of torch.func")
    return "torch.autograd.forward_ad.dual_level" if forward_ad._current_level >= 0 else None


def layers_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `tensor`, then whatever it wraps inside transforms: each of these layers has a graph of its own."""
    yield tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor


def outside_transforms(call: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that makes the `call` as if no transform ran: the call writes captured tensors."""

    def called(*arguments: _P.args, **named: _P.kwargs) -> None:
        if running_transform() is None:
            call(*arguments, **named)
        else:
            with temporarily_clear_interpreter_stack():
                call(*arguments, **named)

    return called
