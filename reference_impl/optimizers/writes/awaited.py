# SPDX-License-Identifier: Apache-2.0
"""A parameter with its new weight on the way: every read or write waits first, by whatever way.

Behind an attached `step()` the model's forward waits for each weight. Others read weights too, or write them: an
average, a clamp through `.data`, a logger. Until a weight has arrived, its parameter is of a class of its own, whose
`__torch_function__` waits; then it is an `nn.Parameter` again. So nothing is asked of anybody, and nothing is there
once weights are new. So it is with a DTensor, whose methods wait as well. Parameters of a class of the user's keep it.

If backward has begun an update, a weight is new too early for a use before `step()`: the use is an error.

Explained in docs/optimizer-offloading.md, "Writing weights yourself".
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reference_impl.memory import arriving
from reference_impl.memory.absent import unanswered

# Attributes, some of them written, and methods that say nothing of a weight's elements, and give no way to them.
_WRITTEN = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_leaf", "grad_fn", "_version"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "output_nr", "retains_grad"),
)
_METHODS = (
    *("size", "stride", "numel", "nelement", "dim", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_shared", "requires_grad_"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
_HARMLESS: frozenset[Any] = frozenset(
    [
        *(
            getattr(getattr(torch.Tensor, name), access)
            for name in _WRITTEN
            for access in ("__get__", "__set__", "__delete__")
        ),
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            torch.empty_like,
            torch.zeros_like,
            torch.ones_like,
            torch.full_like,
            torch.rand_like,
            torch.randn_like,
        ),
        *(getattr(torch.Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor")),
    ]
)


class Waiter(Protocol):
    """The engine of an optimizer whose weights are on their way."""

    _failures: Any
    members: Mapping[torch.Tensor, Any]

    @property
    def is_closed(self) -> bool:
        """Whether nobody updates the weights any more."""

    def wait_for_use(self, members: Iterable[Any]) -> None:
        """Wait for weights, or raise where one cannot be waited for."""


# The owner of the new weights, by the id of each parameter of the class below.
_waiters: dict[int, weakref.ref[Any]] = {}
_makers = threading.local()


class _Awaited(torch.Tensor):
    """A tensor whose new elements are on their way."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` once all its weights are new; a call for a shape or a gradient uses none."""
        kwargs = kwargs or {}
        if func not in _HARMLESS and not getattr(_makers, "is_one", False):
            found = list(_awaited_in([*args, *kwargs.values()]))
            waited = [_wait_for(param) for param in found]
            if all(waited):
                result = func(*args, **kwargs)
                return nn.Parameter(result) if func is torch.Tensor.detach and _makes_parameter() else result
        return unanswered(func, *args, **kwargs)


class AwaitedParameter(_Awaited, nn.Parameter):
    """A parameter whose new weight is on its way."""

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as any use does: torch calls no `__torch_function__` of this one."""
        return self.__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the new weight, as a parameter of torch's own class."""
        _wait_for(self)
        return nn.Parameter.__deepcopy__(self, memo)


class AwaitedShards(_Awaited, DTensor):
    """A sharded parameter whose new shard is on its way.

    `_local_tensor` does not wait: gathers of FSDP2 read it, on a stream that waits itself.
    """

    __slots__ = ()

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """Wait, and return the shard."""
        _wait_for(self)
        return DTensor.to_local(self, **kwargs)

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """Wait, and return all shards together."""
        _wait_for(self)
        return DTensor.full_tensor(self, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Wait, and return it with other placements."""
        _wait_for(self)
        return DTensor.redistribute(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, and copy it."""
        _wait_for(self)
        return DTensor.__deepcopy__(self, memo)


# By the class that a parameter has otherwise.
_CLASSES: dict[type, type] = {nn.Parameter: AwaitedParameter, DTensor: AwaitedShards}
_OWN_CLASSES = {awaited: own for own, awaited in _CLASSES.items()}


def let_wait(params: Iterable[torch.Tensor], waiter: Waiter, *, hears_uses: bool) -> None:
    """Let uses of `params` wait, by `waiter`; not kept alive. Without `hears_uses` only those that ask wait."""
    reference = weakref.ref(waiter)
    for param in params:
        if (awaited := _CLASSES.get(type(param))) is not None:
            _waiters[id(param)] = reference
            arriving.expect(param, _wait_for)
            if hears_uses:
                param.__class__ = awaited


def has_arrived(param: torch.Tensor) -> None:
    """Note that the weight of `param` is new: nothing waits for it any more."""
    _waiters.pop(id(param), None)
    arriving.has_arrived(param)
    if (own := _OWN_CLASSES.get(type(param))) is not None:
        param.__class__ = own


@contextmanager
def new_weights_are_made() -> Iterator[None]:
    """Let this thread use weights inside that are on their way: it makes them, and would wait for itself."""
    made_some = getattr(_makers, "is_one", False)
    _makers.is_one = True
    try:
        yield
    finally:
        _makers.is_one = made_some


def _makes_parameter() -> bool:
    """Return whether `nn.Parameter(param)` has called: it asks for the class that the weight has had until now."""
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


def _awaited_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) in _OWN_CLASSES:
            yield value
        elif isinstance(value, list | tuple):
            yield from _awaited_in(value)


def _wait_for(param: torch.Tensor) -> bool:
    """Wait for a weight; return whether it has arrived."""
    reference = _waiters.get(id(param))
    waiter: Waiter | None = None if reference is None else reference()
    if waiter is not None and waiter._failures.has_turn:
        # The optimizer itself looks at it.
        return False
    # Of one that has lost its work weights are as they are: it has said so, and a checkpoint can be loaded into them.
    if waiter is not None and not waiter.is_closed and waiter._failures.first is None:
        member = waiter.members.get(param)
        if member is not None:
            waiter.wait_for_use([member])
            if member.pending:
                return False
    # Of a copy nobody knows, and an optimizer may be gone.
    has_arrived(param)
    return True
