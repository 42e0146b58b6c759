# SPDX-License-Identifier: Apache-2.0
"""Gradients of a call differentiated in parts: summed up, or written to a part's own place.

Weights of a part are stand-ins for the module's own, so a hook on a weight's gradient hears of it once.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from reference_impl.sequences.positions import Leading

# A module's own parameters, the name of one, and its stand-in meanwhile.
Place = tuple[dict[str, Any], str, torch.Tensor | None]


class Sum:
    """The gradient of a tensor that all parts share, in fp32 at least until it is rounded once."""

    def __init__(self, shared: torch.Tensor) -> None:
        # A leaf's gradient may be asked for in another dtype than its own.
        self._dtype = (shared.grad_dtype if shared.is_leaf else None) or shared.dtype
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor, part: slice) -> None:
        """Add a part's gradient."""
        if self._sum is None:
            # A copy in any case: autograd may have given the same tensor to others.
            self._sum = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            self._sum.add_(gradient)

    def result(self) -> torch.Tensor | None:
        """Return the gradient, None where no part has one, and forget it."""
        sum_, self._sum = self._sum, None
        return None if sum_ is None else sum_.to(self._dtype)


class Joint(Sum):
    """The gradient of a tensor that is cut along a dimension: each part, in their order, has its own or none."""

    def __init__(self, whole: torch.Tensor, dim: int) -> None:
        super().__init__(whole)
        self._whole, self._dim = whole, dim
        # Of all before it is written.
        self._end = 0

    def add(self, gradient: torch.Tensor, part: slice) -> None:
        """Write a part's gradient."""
        if self._sum is None:
            self._sum = torch.empty_like(self._whole)
        self._fill(self._sum, part.start)
        self._sum.narrow(self._dim, part.start, part.stop - part.start).copy_(gradient)
        self._end = part.stop

    def result(self) -> torch.Tensor | None:
        """Return the gradient, None where no part has one, and forget it."""
        if self._sum is not None:
            self._fill(self._sum, self._whole.shape[self._dim])
        return super().result()

    def _fill(self, joined: torch.Tensor, end: int) -> None:
        """Write zeros for parts without a gradient."""
        if end > self._end:
            joined.narrow(self._dim, self._end, end - self._end).zero_()


def of_input(leaf: torch.Tensor, leading: Leading) -> Sum:
    """Return where the gradients of an input's tiles go."""
    return Joint(leaf, leading.dim) if leading.is_cut(leaf) else Sum(leaf)


@contextmanager
def stand_ins(module: nn.Module, weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Have `module` compute with tensors that share memory with `weights`, and are leaves of their own; yield them."""
    # Parameters, since a parametrization that a module registers while it runs makes buffers of other tensors.
    instead = {weight: nn.Parameter(weight.detach()) for weight in weights}
    places: list[Place] = [
        (inner._parameters, name, instead[weight])
        for inner in module.modules()
        for name, weight in inner._parameters.items()
        if weight is not None and weight in instead
    ]
    with replaced(places):
        yield list(instead.values())


@contextmanager
def replaced(places: Sequence[Place]) -> Iterator[None]:
    """Have modules compute with other tensors in the place of their parameters."""
    before = [(held, name, held[name]) for held, name, _ in places]
    try:
        for held, name, tensor in places:
            held[name] = tensor
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def refuse_other_leaves(name: str, ends: Iterable[Any], sources: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError where the graph behind the nodes `ends` has other leaves: their gradients would be lost."""
    known = {id(source) for source in sources}
    others = [
        node.variable
        for node in nodes_of(ends)
        if hasattr(node, "variable") and id(node.variable) not in known
    ]
    if others:
        shapes = ", ".join(sorted(str(tuple(each.shape)) for each in others))
        raise RuntimeError(
            f"{name} computes with trained tensors that are none of its parameters, of shape {shapes}; expected "
            f"parameters of {name}, or inputs of its forward; try leaving {name} out of tiles"
        )


def refuse_second_derivatives(name: str, parts: str) -> None:
    """Raise RuntimeError in a backward whose own graph is asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a gradient of a gradient was asked for through {name}, which runs in {parts} (create_graph=True); "
            f"expected first derivatives; try leaving it out of {parts}"
        )


def leaves_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves that the graph of `outputs` ends in."""
    for node in nodes_of(output.grad_fn for output in outputs):
        if hasattr(node, "variable"):
            yield node.variable


def nodes_of(ends: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph behind the nodes `ends`, these among them."""
    pending = list(ends)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        yield node
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        pending += new
