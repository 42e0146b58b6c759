# SPDX-License-Identifier: Apache-2.0
"""Hooks that an optimizer has on a model: they leave when the model is copied, and keep nobody alive.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec

from reference_impl.optimizers.layout import Member

_P = ParamSpec("_P")


class ModelHook:
    """A hook on a module that does not travel: in a copy or a pickle of the module it does nothing.

    So a copied model is independent of the optimizer, and loads where this package is not installed. Copying waits for
    new weights by `finish`; the module's `own` members have been copied by then, so a deep copy takes these again.
    """

    __slots__ = ("_finish", "_own", "_run")

    def __init__(
        self,
        run: Callable[..., None],
        *,
        own: Sequence[Member] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._own = own
        self._finish = finish

    def __call__(self, *arguments: Any) -> None:
        """Run the hook."""
        self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a function that takes anything and does nothing."""
        late = [member.param for member in self._own if member.pending and id(member.param) in memo]
        if self._finish is not None:
            self._finish()
        for param in late:
            memo[id(param)].detach().copy_(param.detach())
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the standard library's function that takes anything and does nothing.

        Raises RuntimeError when new weights were on their way to parameters that are in the pickle by now.
        """
        if any(member.pending for member in self._own):
            raise RuntimeError(
                "a model was pickled while new weights were on their way; expected finished ones; try "
                "optimizer.synchronize() before"
            )
        if self._finish is not None:
            self._finish()
        return getattr, (nullcontext(), "__exit__")


def forgetful(method: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that calls a bound `method` as long as its owner lives, without keeping the owner alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: _P.args, **named: _P.kwargs) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments, **named)

    return call
