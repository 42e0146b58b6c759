# SPDX-License-Identifier: Apache-2.0
"""Matrix products that a part's second forward leaves out: backward needs their nodes, nobody their values.

The last product of an MLP is one. A first forward computes everything and follows the results. A product is needed
where an operation beyond a few that keep no values meets its result, or where something that depends on it is alive
when the outputs are let go, as a tensor saved for backward is. Later forwards have memory without values in place of
the others' results, and follow it likewise: if one is needed after all, the part is computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_ATEN = torch.ops.aten


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(_ATEN, name) for name in names]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


# The place of the first matrix among their arguments; the second follows it.
_FIRST_MATRIX = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1}
# They read no values into Python, have no shapes that depend on values, and do not save their results.
_PASSES_ON = _overloads(
    *("view", "_unsafe_view", "transpose", "clone", "_to_copy"),
    *("add", "add_", "mul", "mul_", "index_add", "index_add_"),
)
# A kernel that torch does not see may write to their results.
_UNWRITTEN = _overloads(
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("zeros", "zeros_like", "new_zeros"),
)
_NONE: frozenset[int] = frozenset()


# Where backward of an output begins, and its shape.
End = tuple[GradientEdge, torch.Size]


class UnneededProducts:
    """Of each module, by their numbers in a call; none of a module where one was needed after all."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()

    def ends(self, module: nn.Module, call: Callable[[], Any]) -> list[End | None] | None:
        """Return the ends of the graph of `call()` of `module`, None for an output without a gradient.

        Returns None where a product was left out that is needed: the next time everything is computed.
        """
        spared = _NONE if _has_compiled() else self._of.get(module)
        following = None if spared == _NONE else _Following(spared)
        try:
            with torch.enable_grad(), following or nullcontext():
                found = [
                    (get_gradient_edge(each), each.shape) if each.requires_grad else None
                    for each in tree_flatten(call())[0]
                    if isinstance(each, torch.Tensor)
                ]
        except Exception:
            # Perhaps of the module, around ours.
            if not (spared and following and following.met):
                raise
        if following is None:
            return found
        needed = following.needed()
        if spared is None:
            self._of[module] = following.numbers - needed
        elif needed:
            self._of[module] = _NONE
            return None
        return found


class _NeededError(Exception):
    """Ends a forward that needs what was left out."""


class _Following(TorchDispatchMode):
    """Follows results of products: of those `spared`, or with None of all, which are computed."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, which takes seconds.
        return False

    def __init__(self, spared: frozenset[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spared = spared
        self._count = 0
        # By the address of memory that depends on products: it is not used again while there is a reference.
        self._dependent: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}
        # Of the products that are followed, and of those that an operation needs.
        self.numbers: frozenset[int] = _NONE
        self.met: set[int] = set()

    def needed(self) -> set[int]:
        """Return the numbers of products that are needed, when the outputs have been let go."""
        alive = (numbers for storage, numbers in self._dependent.values() if not storage.expired())
        return self.met.union(*alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Not inside an autograd function, which may keep anything, nor of a tensor with its own operations.
        is_plain = not types and torch.is_grad_enabled()
        numbers = self._numbers(args, kwargs) if self.numbers else _NONE
        if numbers and not (is_plain and func in _PASSES_ON):
            self._need(numbers)
            numbers = _NONE
        first = _FIRST_MATRIX.get(func) if is_plain else None
        if first is not None:
            number, self._count = self._count, self._count + 1
            if self._spared is None or number in self._spared:
                numbers = frozenset((number,))
                self.numbers |= numbers
        elif types or func in _UNWRITTEN:
            numbers = self.numbers
        if first is not None and numbers and self._spared is not None:
            result = args[first].new_empty((*args[first].shape[:-1], args[first + 1].shape[-1]))
        else:
            result = func(*args, **kwargs)
        if numbers:
            for each in _tensors((result,)):
                # Of whole numbers, a place in another tensor; a sparse one, whose memory is elsewhere.
                if not (each.is_floating_point() and torch._C._has_storage(each)):
                    self._need(numbers)
                    continue
                storage = each.untyped_storage()
                self._dependent[storage._cdata] = StorageWeakRef(storage), numbers
        return result

    def _need(self, numbers: frozenset[int]) -> None:
        self.met |= numbers
        if self._spared is not None:
            raise _NeededError

    def _numbers(self, args: Any, kwargs: dict[str, Any]) -> frozenset[int]:
        """Return the numbers of products that arguments depend on."""
        found = _NONE
        for each in _tensors((*args, *kwargs.values())):
            if torch._C._has_storage(each):
                dependent = self._dependent.get(each.untyped_storage()._cdata)
                if dependent is not None:
                    found |= dependent[1]
        return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _has_compiled() -> bool:
    """Whether this process has compiled code, which would not run compiled under a mode, nor ever after."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
