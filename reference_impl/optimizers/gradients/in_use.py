"""A gradient on its parameter that a begun update still reads: whoever writes it waits for the update first.

`GradientInUse` has the gradient's own memory, so all that reads it finds its values. It takes the gradient's place on
`param.grad` from `step()` until a forward has waited for the new weight.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from reference_impl.optimizers.layout import Member


class GradientInUse(torch.Tensor):
    """`gradient`, which is written only once `finish()` has made the live current stream wait for its update."""

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, finish: Callable[[], None]) -> GradientInUse:
        """Share the memory of `gradient`."""
        made: GradientInUse = torch.Tensor._make_subclass(cls, gradient)
        return made

    def __init__(self, gradient: torch.Tensor, finish: Callable[[], None]) -> None:
        self.gradient = gradient
        self.finish = finish

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values, as `torch.Tensor.numpy` does, which takes no subclass."""
        return self.gradient.numpy(force=force)

    def tolist(self) -> Any:
        """Return the values, as `torch.Tensor.tolist` does, which takes no subclass."""
        return self.gradient.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy that nobody reads."""
        return self.gradient.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Become the gradient itself in a pickle."""
        return self.gradient.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` with the gradients themselves, behind their updates where it writes; guard views of them too."""
        used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, GradientInUse)]
        if func._schema.is_mutable:
            for each in used:
                each.finish()
        args, kwargs = tree_map_only(GradientInUse, lambda each: each.gradient, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            return result
        memory = {each.gradient.untyped_storage()._cdata: each.finish for each in used}

        def guarded(tensor: torch.Tensor) -> torch.Tensor:
            finish = memory.get(tensor.untyped_storage()._cdata)
            return tensor if finish is None else GradientInUse(tensor, finish)

        return tree_map_only(torch.Tensor, guarded, result)


def put_in_use(
    read: Mapping[Member, tuple[torch.Tensor, int]], wait_for: Callable[[Sequence[Member]], None]
) -> None:
    """Guard the gradients that an update reads where they stand, until `take_out`; a write calls `wait_for`."""
    for member, (gradient, _) in read.items():
        if member.param.grad is gradient and type(gradient) is torch.Tensor:
            member.param.grad = GradientInUse(gradient, partial(wait_for, [member]))


def take_out(member: Member) -> None:
    """Put the gradient itself back, unless another one stands there."""
    stands = member.param.grad
    if isinstance(stands, GradientInUse):
        member.param.grad = stands.gradient


def in_use(members: Iterable[Member]) -> list[Member]:
    """Return those of `members` whose new weight nobody waits for, and whose gradient is that of the last step."""
    return [member for member in members if member.pending and isinstance(member.param.grad, GradientInUse)]


def itself(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient that stands on a parameter, guarded or not."""
    return gradient.gradient if isinstance(gradient, GradientInUse) else gradient
