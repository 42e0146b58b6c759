# SPDX-License-Identifier: Apache-2.0
"""Closing after a failure: every resource is closed, and an exception already raised stays the one that is reported.

A file of its own, because the activation and the weight offloaders close alike without knowing each other. Explained in
docs/reliability.md.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle

from reference_impl.device import device_is_lost
from reference_impl.memory.interrupts import deferred_interrupts

_T = TypeVar("_T")


def undo_all(steps: list[Callable[[], None]]) -> None:
    """Run and remove all of `steps`, the last first, and raise the first error at the end.

    A step that has raised stays in the list, so that another call tries it again. Each may be done twice.
    """
    raised: BaseException | None = None
    untried = len(steps)
    while untried:
        untried -= 1
        try:
            steps[untried]()
            # Only here: an interrupt leaves a step in the list that may have been done, and loses none.
            del steps[untried]
        except BaseException as error:
            raised = raised or error
    if raised is not None:
        raise raised


def undo_as_one(steps: list[Callable[[], None]]) -> None:
    """Run `undo_all`, and no signal in between: half of what was half made would be left."""
    with deferred_interrupts():
        undo_all(steps)


def do_undoably(do: Callable[[], Callable[[], None]], steps: list[Callable[[], None]]) -> None:
    """Call `do` and add its result, the call that undoes it, to `steps`: both, or neither if either raises."""
    with deferred_interrupts():
        undo = do()
        try:
            steps.append(undo)
        except BaseException:
            undo()
            raise


def owned(
    owner: object, acquire: Callable[[], _T], release: Callable[[_T], object]
) -> tuple[_T, Callable[[], object]]:
    """Return a resource and the call that releases it: once, and at the latest when `owner` is collected."""
    with deferred_interrupts():
        resource = acquire()
        try:
            finalizer = weakref.finalize(owner, release, resource)
        except BaseException:
            release(resource)
            raise
    return resource, partial(_finalize, finalizer)


def _finalize(finalizer: Callable[[], object]) -> None:
    # An action cut short between its two halves is over, and has done nothing.
    with deferred_interrupts():
        finalizer()


def register_undoably(
    register: Callable[..., RemovableHandle],
    hook: Callable[..., object],
    steps: list[Callable[[], None]],
    **options: bool,
) -> None:
    """Call torch's method `register` with a hook; `steps` gets its removal."""
    do_undoably(lambda: register(hook, **options).remove, steps)


def register_first(
    register: Callable[..., RemovableHandle],
    hooks: Any,
    hook: Callable[..., object],
    steps: list[Callable[[], None]],
) -> None:
    """Register as `register_undoably`, in front of all `hooks` of the kind: torch has no `prepend` for these."""

    def do() -> Callable[[], None]:
        handle = register(hook)
        hooks.move_to_end(handle.id, last=False)
        return handle.remove

    do_undoably(do, steps)


def close_behind(error: BaseException | None, close: Callable[[], None]) -> None:
    """Call `close` at the end of a `with` block that `error`, if any, has left; its own error never hides that."""
    try:
        close()
    except BaseException as failure:
        if error is None:
            raise
        error.add_note(f"closing has failed too: {type(failure).__name__}: {failure}; try close() again")


@contextmanager
def closed_behind(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` behind the block, also where it raises; the exception of the block stays the one that is raised."""
    try:
        yield
    except BaseException as error:
        close_behind(error, close)
        raise
    close()


class ClosedAtExit(ABC):
    """Its `with` block closes it at the end; an exception from the block stays the raised one."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Again, it goes on where it has failed; once all is given back, it does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an exception from the block stays the raised one."""
        close_behind(error, self.close)


@contextmanager
def past_a_lost_device() -> Iterator[None]:
    """Warn of the error of a lost device instead of raising it: its memory cannot be given back any more."""
    try:
        yield
    except BaseException as error:
        if not device_is_lost(error):
            raise
        warnings.warn(f"closed without the data on the device, which is lost: {error}", stacklevel=4)
