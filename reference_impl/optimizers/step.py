# SPDX-License-Identifier: Apache-2.0
"""The decisions of one optimizer step before any update begins.

A step is prepared, then it begins. Preparing allocates and checks everything for the step; it may fail, and changes
nothing. From its begin on the step owns its gradients, hyper-parameters and clip decision (`StepPlan`). Then it queues
kernels and copies, inside `as_one`: no signal comes between them, and they fail only where the device or a worker is
lost. `Failures` records the state in which errors have left an optimizer.

Explained in docs/optimizer-offloading.md, "When something fails".
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch

from reference_impl.device import device_is_lost
from reference_impl.memory.compiler import uncompiled
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.optimizers.gradients.clip_decision import ClipDecision
from reference_impl.optimizers.gradients.scale import take_scale

Status = Literal["untouched", "begun", "broken", "closed"]

_LEAST_NORMAL = sys.float_info.min


def snapshot(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the hyper-parameters of parameter groups, tensors included, without the parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def flushes_denormals() -> bool:
    """Return whether the calling thread takes denormal numbers for zeros, as `torch.set_flush_denormal` lets it."""
    return _LEAST_NORMAL / 2 == 0.0


@dataclass(frozen=True, eq=False, slots=True)
class StepPlan:
    """The hyper-parameters of one step, by group, its clip decision, and how the CPU takes denormal numbers.

    Without a decision gradients are taken as they are and the step is not skipped. Denormal numbers are taken as the
    thread takes them that makes the plan.
    """

    groups: list[dict[str, Any]]
    decision: ClipDecision | None
    flushes_denormals: bool = field(default_factory=flushes_denormals)

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
        """Raise RuntimeError if the hyper-parameters `names` in `groups` differ from this plan's.

        They belong to `step()`, so they may not change once backward has used them. Other entries of a group belong to
        other code.
        """
        listed = list(names)
        for used, now in zip(self.groups, groups, strict=True):
            for key in listed:
                value = used.get(key)
                if value != now.get(key):
                    raise RuntimeError(
                        f"{key} changed from {value} to {now.get(key)} between backward and step(), after the update "
                        "had begun; expected it to stay; try changing it after step(), or "
                        "backward_overlap='gradients'"
                    )


def is_lasting(error: BaseException) -> bool:
    """Return whether the device or a worker is gone after `error`: trying again would not help."""
    return isinstance(error, WorkLostError) or device_is_lost(error)


class WorkLostError(RuntimeError):
    """A begun step could not be carried out: the weights that it was updating are neither old nor new."""


class as_one(deferred_interrupts):  # noqa: N801 (used like a function, as contextlib's)
    """Queue kernels and copies of a begun step as one: signals wait until the end, and an error loses the step.

    All memory has been allocated before. Raises WorkLostError from any error inside, but for that of a lost device.

    Args:
        behind: called behind a step that has been queued, before signals; its own error loses no step.
    """

    __slots__ = ("_behind",)

    def __init__(self, *, behind: Callable[[], None] | None = None) -> None:
        self._behind = behind

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Run the handlers of signals, unless the step is lost: its own error says more."""
        try:
            if error is None and self._behind is not None:
                self._behind()
        finally:
            try:
                super().__exit__(kind, error, trace)
            finally:
                if error is not None and not is_lasting(error):
                    raise _lost_step(error) from error


def _lost_step(error: BaseException) -> WorkLostError:
    return WorkLostError(
        f"a step that had begun could not be carried out: {error!r}; expected its kernels and copies to be queued, for "
        "which all memory is there; try loading the last checkpoint into a new optimizer"
    )


_NOTE = "optimizer.status is "
_NOTES = {
    "untouched": "the step has changed nothing: step() again, or leave the batch out with zero_grad()",
    "begun": "the step has begun: the next step(), synchronize(), state_dict(), zero_grad() or forward completes it",
    "broken": "the optimizer is lost: load the last checkpoint into a new one",
}


class Failures:
    """The thread at work on an optimizer, and the error that has broken it, if any.

    One thread at a time works with it (`in_turn`), so that a begun step is carried out by one. Errors tell the
    fate of the step.

    Args:
        status: returns the optimizer's status; not kept alive.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = weakref.WeakMethod(status)
        # Workers never take it: its holder may wait for them.
        self.turn = threading.RLock()
        # Whether a begun step has been reported: a caller may go on with it by step().
        self.reported_begun = False
        self.first: BaseException | None = None
        _all.add(self)

    @property
    def has_turn(self) -> bool:
        """Whether it is the calling thread's turn."""
        return bool(self.turn._is_owned())  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise the first error after which the optimizer is broken, as one of its type."""
        if self.first is None:
            return
        message = f"the optimizer is broken since: {self.first}"
        try:
            again = type(self.first)(message)
        except Exception:
            again = RuntimeError(message)
        raise again from self.first

    @contextmanager
    def noting_status_on_error(self) -> Iterator[None]:
        """Note the fate of the step on each exception that is raised inside."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Note the fate of the step on `error`; an earlier call's note knew less, and makes way."""
        with self.turn:
            if self.first is None and is_lasting(error):
                self.first = error
            status = self._status()
            if status is None:
                return
            found = status()
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if not note.startswith(_NOTE)]
            if found != "closed":
                error.add_note(f"{_NOTE}{found!r}: {_NOTES[found]}")
            if found == "begun":
                self.reported_begun = True


# A forked child has none of the threads that may have had their turn.
_all: weakref.WeakSet[Failures] = weakref.WeakSet()


def _renew_turns() -> None:
    for each in _all:
        each.turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turns)


class _Fails(Protocol):
    _failures: Failures


class _Steps(_Fails, Protocol):
    _engine: Any


_Optimizer = TypeVar("_Optimizer", bound=_Fails)
_Stepped = TypeVar("_Stepped", bound=_Steps)
_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Optimizer, _P], _Result]


def without_gradients(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Run `function` without gradient mode. After an interrupt `torch.no_grad()` might leave it off."""

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _Result:
        computes = torch.is_grad_enabled()
        try:
            try:
                torch._C._set_grad_enabled(False)
                return function(*args, **named)
            finally:
                torch._C._set_grad_enabled(computes)
        finally:
            # An interrupt may have come before the same line above.
            torch._C._set_grad_enabled(computes)

    return call


def as_steps_run(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Run `function` without gradients, as `without_gradients`, and out of inference mode, in which a caller may be.

    Torch's context manager would leave its guard to the traceback of an interrupt that comes behind its begin. The
    guard sets the thread back once that is dropped: gradients are off from then on.
    """

    @without_gradients
    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _Result:
        guard = torch._C._InferenceMode(False)
        try:
            try:
                guard.__enter__()
                # The guard has set it anew.
                torch._C._set_grad_enabled(False)
                return function(*args, **named)
            finally:
                guard.__exit__(None, None, None)
        finally:
            guard.__exit__(None, None, None)

    return call


def in_turn(method: _Method[_Optimizer, _P, _Result]) -> _Method[_Optimizer, _P, _Result]:
    """Let one thread at a time run `method` of an optimizer, without gradient mode; its errors tell the fate of a step.

    An interrupt never leaves the turn taken: torch's functions and locks take and give back as one bytecode; a context
    manager in Python would not.
    """
    run = without_gradients(method)

    @functools.wraps(method)
    def call(optimizer: _Optimizer, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        failures = optimizer._failures
        turn, had_turn = failures.turn, failures.has_turn
        try:
            with turn:
                try:
                    return run(optimizer, *args, **named)
                except BaseException as error:
                    failures.tell(error)
                    raise
        finally:
            # An interrupt may have come between the last bytecode of the block and the one that gives the turn back.
            if failures.has_turn and not had_turn:
                turn.release()

    return call


def hooked(step: _Method[_Stepped, _P, _Result]) -> _Method[_Stepped, _P, _Result]:
    """Run torch's hooks around `step` of an optimizer; their errors tell the fate of the step, too.

    It is nobody's turn between its parts: a closure has a backward, whose hooks run on other threads.
    """
    run = torch.optim.Optimizer.profile_hook_step(step)

    def carry_out(optimizer: _Stepped, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        computes = torch.is_grad_enabled()
        optimizer._engine.site.note_thread()
        try:
            try:
                return run(optimizer, *args, **named)
            finally:
                torch._C._set_grad_enabled(computes)
        finally:
            torch._C._set_grad_enabled(computes)

    @functools.wraps(step)
    def call(optimizer: _Stepped, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        try:
            # A compiler would trace kernels and copies of a begun step, and give up in their midst.
            return uncompiled(functools.partial(carry_out, optimizer, *args, **named))()
        except BaseException as error:
            # GradScaler deletes the scale after a step has returned. It multiplies its next scale by a remaining one.
            take_scale(optimizer)
            # A hook of the user's may have raised in front of it.
            optimizer._engine.has_raised(*args, **named)
            optimizer._failures.tell(error)
            raise

    # As torch marks a method that has its hooks.
    call.hooked = True  # type: ignore[attr-defined]
    return call
