# SPDX-License-Identifier: Apache-2.0
"""Runs around the calls of a model's modules that are divided into parts, from its construction to `close()`.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from reference_impl.activations.attach import Forward, modules_called, wrap_forward
from reference_impl.memory.closing import ClosedAtExit, close_behind, do_undoably, undo_all
from reference_impl.memory.shown import Shown
from reference_impl.memory.transforms import running_transform
from reference_impl.sequences.inside import A_PART
from reference_impl.sequences.positions import Leading, leading_of


class DividedCalls(Shown, ClosedAtExit):
    """Attached to modules until `close()`; a context manager. A subclass says how a call is divided."""

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], *, longer_than: int) -> None:
        """Wrap `modules` of `model`; their calls of no more than `longer_than` positions run as they are."""
        self._longer_than = longer_than
        self._undo: list[Callable[[], None]] = []
        names = {module: name for name, module in model.named_modules()}
        try:
            for module in modules:
                do_undoably(partial(wrap_forward, module, partial(self._around, names[module])), self._undo)
        except BaseException as error:
            close_behind(error, self.close)
            raise

    @property
    def _status(self) -> str:
        return "attached" if self._undo else "closed"

    def close(self) -> None:
        """Let all modules run as they are. Calling it again does nothing. Graphs that are alive keep their parts."""
        undo_all(self._undo)

    def __enter__(self) -> Self:
        """Return this object, attached already."""
        return self

    def _around(
        self, name: str, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        leading = leading_of(leaves)
        if leading is None or leading.count <= self._longer_than or running_transform() is not None or A_PART:
            return forward(*args, **kwargs)
        run = self._divided(name, forward, module, leaves, structure, leading)
        return forward(*args, **kwargs) if run is None else run()

    @abstractmethod
    def _divided(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
    ) -> Callable[[], Any] | None:
        """Return a function that runs a call of `module` in parts, or None to run it as it is.

        Raises ValueError for a module that was named and cannot be divided.
        """


def named(model: nn.Module, option: str, endings: Sequence[str], example: str) -> list[nn.Module]:
    """Return the modules with one of the `endings` in their names; `option` is the caller's name for these.

    Raises ValueError where there are none.
    """
    if not endings:
        raise ValueError(
            f"{option} is empty; expected endings of names of modules; try [{example!r}], or none to have them found"
        )
    return modules_called(model, endings)


def repeatable_call(
    forward: Forward, module: nn.Module, structure: TreeSpec
) -> Callable[[Sequence[Any]], Any]:
    """Return a function that calls `module` with leaves of `structure`, to try it on few positions."""
    # Compiled code would be compiled again for each of the sizes that are tried.
    plain = forward if module._compiled_call_impl is None else module.forward

    def call(inputs: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(inputs), structure)
        return plain(*args, **kwargs)

    return call


def check_whole(name: str, value: object, least: int, usual: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number of at least {least}; try {usual}")
