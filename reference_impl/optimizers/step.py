"""What one optimizer step has decided before any update begins.

A step is prepared, begins and is carried out. Preparing may fail and changes nothing. It begins with one assignment,
and from there on owns its gradients, hyper-parameters and clip decision (`StepPlan`): every share works from the same
plan, and nothing in it changes while the step runs. `BegunStep` holds what is left to carry out, so that a later call
can finish the step. `Failures` records the state in which errors have left an optimizer.

Explained in docs/optimizer-offloading.md, "When something fails".
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from reference_impl.device import device_is_lost
from reference_impl.optimizers.clip_decision import ClipDecision

Operation = Callable[[], None]
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
    """The hyper-parameters of one step, by group, its clip decision, and what the CPU makes of denormal numbers.

    Without a decision gradients are taken as they are and the step is not skipped. Denormal numbers are taken as the
    thread takes them that makes the plan.
    """

    groups: list[dict[str, Any]]
    decision: ClipDecision | None
    flushes_denormals: bool = field(default_factory=flushes_denormals)

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
        """Raise RuntimeError when the hyper-parameters `names` in `groups` are not those of this plan.

        They belong to `step()`, so they may not change once backward has used them. What else stands in a group is
        somebody else's.
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


class BegunStep:
    """The operations of a step that are still to do, in order.

    Each one happens, or raises before it has had an effect. `gradients` are what stood on the parameters when the step
    was taken; what stands there later is new.
    """

    def __init__(self, operations: Iterable[Operation], gradients: Mapping[Any, torch.Tensor]) -> None:
        self._left = deque(operations)
        self.gradients = gradients

    @property
    def is_queued(self) -> bool:
        """Whether every operation has happened."""
        return not self._left

    def advance(self) -> None:
        """Do what is left; after an error the next call goes on with the operation that has failed."""
        while self._left:
            self._left[0]()
            self._left.popleft()


def is_lasting(error: BaseException) -> bool:
    """Return whether the device or a worker is gone after `error`: trying again would not help."""
    return isinstance(error, WorkLostError) or device_is_lost(error)


class WorkLostError(RuntimeError):
    """A worker has failed inside an update: what it was updating is neither old nor new."""


_NOTES = {
    "untouched": "the step has changed nothing: step() again, or leave the batch out with zero_grad()",
    "begun": "the step has begun: the next step(), synchronize(), state_dict(), zero_grad() or forward completes it",
    "broken": "the optimizer is lost: load the last checkpoint into a new one",
    "closed": "the optimizer is closed",
}


class Failures:
    """What errors have left of an optimizer: whether it is broken, and how a step that has begun gets finished.

    Args:
        status: returns the optimizer's status; not kept alive.
        finish: finishes a step that has begun; not kept alive.
    """

    def __init__(self, status: Callable[[], Status], finish: Callable[[], None]) -> None:
        self._status, self._finish = weakref.WeakMethod(status), weakref.WeakMethod(finish)
        self._hook: RemovableHandle | None = None
        self._depth = 0
        self.first: BaseException | None = None

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
    def told(self) -> Iterator[None]:
        """Note on what is raised inside what became of the step; one that has begun is finished by any forward."""
        self._depth += 1
        try:
            yield
        except BaseException as error:
            if self.first is None and is_lasting(error):
                self.first = error
            if self._depth == 1:
                self._tell(error)
            raise
        finally:
            self._depth -= 1

    def _tell(self, error: BaseException) -> None:
        status = self._status()
        if status is None:
            return
        told = status()
        if not any(each.startswith("optimizer.status") for each in getattr(error, "__notes__", ())):
            error.add_note(f"optimizer.status is {told!r}: {_NOTES[told]}")
        if told == "begun" and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: Any) -> None:
        finish = self._finish()
        if finish is None:
            self.forget_forward()
        else:
            finish()

    def forget_forward(self) -> None:
        """Take the hook on every forward off: nothing is left to finish."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
