# SPDX-License-Identifier: Apache-2.0
"""Matrix products that a part's second forward leaves out: its graph needs their nodes, and nobody their values.

The last product of an MLP is one. Backward multiplies by its weight and its input; its result went on to the layer.

Results are followed through a first forward that computes everything. A product is needed where an operation beyond a
few that keep no values meets its result, or where something that depends on it is alive when the outputs are let go:
a tensor saved for backward, an attribute of an autograd function. Later forwards have memory without values in the
place of other products' results. They follow it likewise: if it is needed after all, the part is computed again.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
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
_FIRST_MATRIX = {
    _ATEN.mm.default: 0,
    _ATEN.bmm.default: 0,
    _ATEN.addmm.default: 1,
    _ATEN.baddbmm.default: 1,
}
# They neither read values into Python, nor have shapes that depend on values, nor save their own results.
_PASSES_ON = _overloads(
    *(
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "squeeze",
        "unsqueeze",
        "slice",
        "split",
    ),
    *("clone", "_to_copy", "cat", "add", "add_", "sub", "mul", "mul_", "div", "index_add", "index_add_"),
)
# A kernel that torch does not see may write to their results.
_UNWRITTEN = _overloads(
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("zeros", "zeros_like", "new_zeros"),
)
_NONE: frozenset[int] = frozenset()


class End(NamedTuple):
    """Where backward of a tensor begins, and its shape."""

    edge: GradientEdge
    shape: torch.Size


class UnneededProducts:
    """What is known of modules whose calls are computed again."""

    def __init__(self) -> None:
        # By their numbers in a call. Of a module that was wrong once, none.
        self._of: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()

    def ends(self, module: nn.Module, call: Callable[[], Any]) -> list[End | None] | None:
        """Return the ends of the graph that `call()` of `module` makes, one for each tensor, None without a gradient.

        Returns None where a product was left out that is needed: another call of this method computes everything.
        """
        spared = _NONE if _has_compiled() else self._of.get(module)
        following = None if spared == _NONE else _Following(spared)
        try:
            with torch.enable_grad(), following or nullcontext():
                found = _ends(call())
        except Exception:
            # The module's own code may have wrapped the error in another.
            if following is None or not following.is_wrong:
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


def _ends(made: Any) -> list[End | None]:
    return [
        End(get_gradient_edge(each), each.shape) if each.requires_grad else None
        for each in tree_flatten(made)[0]
        if isinstance(each, torch.Tensor)
    ]


class _NeededError(Exception):
    """Ends a forward in which the result of a product that was left out is needed."""


class _Following(TorchDispatchMode):
    """Follows results of products through a forward: of those `spared`, or of all with None, which are computed."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # No compiled code runs under it; keeping the compiler out would import it, which takes seconds.
        return False

    def __init__(self, spared: frozenset[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spared = spared
        self._count = 0
        # Of memory that depends on products, by its address: it is not used again while a reference is there.
        self._dependent: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}
        self._needed: set[int] = set()
        # Of the products that are followed.
        self.numbers: frozenset[int] = _NONE

    @property
    def is_wrong(self) -> bool:
        """Whether the result of a product that was left out is needed."""
        return self._spared is not None and bool(self._needed)

    def needed(self) -> set[int]:
        """Return the numbers of products that are needed, when the forward's outputs have been let go."""
        for storage, numbers in self._dependent.values():
            if not storage.expired():
                self._needed |= numbers
        return self._needed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Not inside an autograd function, which may keep what it likes, nor of a tensor that computes in its own way.
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
            if self._spared is not None and numbers:
                result = args[first].new_empty((*args[first].shape[:-1], args[first + 1].shape[-1]))
            else:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            if types or func in _UNWRITTEN:
                numbers = self.numbers
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
        self._needed |= numbers
        if self._spared is not None:
            raise _NeededError

    def _numbers(self, args: Any, kwargs: dict[str, Any]) -> frozenset[int]:
        """Return the numbers of products that an operation's arguments depend on."""
        found = _NONE
        for each in _tensors((*args, *kwargs.values())):
            if torch._C._has_storage(each):
                dependent = self._dependent.get(each.untyped_storage()._cdata)
                if dependent is not None:
                    found |= dependent[1]
        return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield tensors, also of lists."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _has_compiled() -> bool:
    """Whether this process has compiled code: under a mode it would run as it was written, and for ever after."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
