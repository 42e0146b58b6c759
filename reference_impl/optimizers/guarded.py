# SPDX-License-Identifier: Apache-2.0
"""A tensor with shared memory: a write to it, or to a view of it, is heard before and after.

Apart because gradients still read by an update and streamed states are both such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class GuardedTensor(torch.Tensor):
    """Has the memory of `plain`, so every reader finds its values; a subclass hears of writes."""

    plain: torch.Tensor

    @classmethod
    def over(cls, plain: torch.Tensor) -> Self:
        """Return one over the memory of `plain`."""
        made: Self = torch.Tensor._make_subclass(cls, plain)
        made.plain = plain
        return made

    def before_write(self) -> None:
        """Hear that this is about to be written."""

    def after_write(self) -> None:
        """Hear that this was written."""

    def guarding(self, view: torch.Tensor) -> Self:
        """Return the same for a view of this one's memory."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values, as `torch.Tensor.numpy` does; torch's takes no subclass."""
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        """Return the values, as `torch.Tensor.tolist` does; torch's takes no subclass."""
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy that nobody guards."""
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Become the plain tensor in a pickle."""
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` with the plain tensors; their guard hears of its writes, and guards its views too."""
        used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, GuardedTensor)]
        args, kwargs = tree_map_only(GuardedTensor, lambda each: each.plain, (args, kwargs or {}))
        if func._schema.is_mutable:
            for each in used:
                each.before_write()
            result = func(*args, **kwargs)
            for each in used:
                each.after_write()
            return result
        result = func(*args, **kwargs)
        memory = {each.plain.untyped_storage()._cdata: each for each in used}

        def guarded(tensor: torch.Tensor) -> torch.Tensor:
            guard = memory.get(tensor.untyped_storage()._cdata)
            return tensor if guard is None else guard.guarding(tensor)

        return tree_map_only(torch.Tensor, guarded, result)
