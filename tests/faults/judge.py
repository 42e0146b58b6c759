# SPDX-License-Identifier: Apache-2.0
"""Trains with one fault and tells the run's fate.

After the fault the program acts as somebody's loop would (`ACTIONS`), and trains on. At the end all weights, masters,
moments and step counts are compared, bit for bit, with two undisturbed runs: one took every batch, the other left out
the batch of the fault.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import injector as injection
import torch
from injector import Fault, Injector, OnceBegun
from interrupts import Interrupt
from leftovers import Leftovers
from python_faults import OTHERS_FRAMES, NoMemory, TooDeep, deeper
from settings import STEPS, Setting, Trainee, differing

from reference_impl.device import Device

Snapshot = dict[str, torch.Tensor]
ACTIONS = ("skip", "again", "state_dict", "synchronize", "forward", "close")
# The fault comes in one of these steps: before them there is nothing to lose, after the last nothing would show it.
FAULTY_STEPS = range(1, STEPS - 1)


# `step()` itself, and the contexts that it enters to hear of errors.
_CALLS_BEFORE_NOTES = 2


class Verdict(enum.Enum):
    """The fate of a run with a fault."""

    TAKEN = "exact-taken"
    SKIPPED = "exact-skipped"
    BROKEN = "broken-and-says-so"
    SILENT = "SILENT"
    TORN = "TORN"
    STUCK = "STUCK"
    HANG = "HANG"
    LEAK = "LEAK"
    CRASH = "CRASH"
    MISSED = "MISSED"
    UNSAID = "UNSAID"

    @property
    def passes(self) -> bool:
        """Whether the contract allows it."""
        return self in (Verdict.TAKEN, Verdict.SKIPPED, Verdict.BROKEN)


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    setting: Setting
    fault: Fault | OnceBegun | Interrupt | NoMemory | TooDeep
    action: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.fault}, then {self.action}"


@dataclass(frozen=True)
class Outcome:
    """A verdict and why."""

    verdict: Verdict
    detail: str = ""


def train(
    trainee: Trainee, injector: Injector, first: int, *, left_out: int | None = None, stop: int = STEPS
) -> None:
    """Train with the batches from `first`; `injector` hears which moment begins."""
    for index in range(first, stop):
        if index != left_out:
            trainee.train(index, injector.enter)


@contextmanager
def opened(setting: Setting, injector: Injector) -> Iterator[Trainee]:
    trainee = Trainee(setting, injector.visit)
    try:
        yield trainee
    finally:
        with injector.quietly():
            trainee.optimizer.close()


@cache
def undisturbed(setting: Setting, left_out: int | None, stop: int = STEPS) -> Snapshot:
    """Return the end of the run without a fault, after batch `stop` - 1."""
    with injection.undisturbed.run(), opened(setting, injector := Injector()) as trainee:
        train(trainee, injector, 0, left_out=left_out, stop=stop)
        return trainee.snapshot() | trainee.averages()


def judge(case: Case) -> Outcome:
    """Run a case."""
    before = Leftovers.now()
    frames = OTHERS_FRAMES if isinstance(case.fault, TooDeep) else 0
    outcome = deeper(frames, lambda: _judged(case))
    if outcome.verdict.passes and (left := before.more_than()):
        return Outcome(Verdict.LEAK, f"after close() stay: {left}; {outcome.detail}")
    return outcome


def _judged(case: Case) -> Outcome:
    fault = case.fault if isinstance(case.fault, Fault) else None
    seen = case.fault if isinstance(case.fault, Fault | OnceBegun) else None
    injector = Injector(seen)
    hears_threads = isinstance(case.fault, NoMemory) and not case.fault.on_main
    with case.fault.comes(injector) if hears_threads else nullcontext():
        trainee = Trainee(case.setting, injector.visit)
        try:
            with injector.installed(Device.of("cpu")) if seen else nullcontext():
                run = _Run(case, trainee, injector)
                outcome = run.outcome()
                injector.enter(STEPS, "close")
                injector.fault = fault if fault and fault.kind == "device_lost" else None
                try:
                    trainee.optimizer.close()
                except Exception as error:
                    if outcome.verdict.passes:
                        outcome = Outcome(Verdict.STUCK, f"close() raised {error!r}")
            return run.remedied() if outcome.verdict is Verdict.BROKEN else outcome
        finally:
            del trainee


class _Run:
    def __init__(self, case: Case, trainee: Trainee, injector: Injector) -> None:
        self._case = case
        self._trainee = trainee
        self._injector = injector
        self._optimizer = trainee.optimizer
        # The fate of the fault's batch, as a look in between has shown it: "taken" or "skipped".
        self._seen: str | None = None
        self._is_interrupted = isinstance(case.fault, Interrupt)
        # The place of the fault, and the texts of all errors.
        self._step = STEPS
        self._said = ""

    def outcome(self) -> Outcome:
        try:
            with self._interrupted():
                train(self._trainee, self._injector, 0)
                self._injector.enter(STEPS, "end")
                self._optimizer.synchronize()
        except (Exception, KeyboardInterrupt) as error:
            if self._injector.error is None:
                return Outcome(Verdict.CRASH, told_of(error))
            if not self._injector.names(error):
                return Outcome(Verdict.STUCK, f"the fault is not named: {told_of(error)}")
            self._step, phase = self._injector.step, self._injector.phase
            self._said += all_of(error)
            outcome = self._after(self._step, phase)
            unsaid = phase == "step" and not self._is_interrupted and self._unsaid(error)
            return Outcome(Verdict.UNSAID, unsaid) if unsaid and outcome.verdict.passes else outcome
        if self._injector.error is None and isinstance(self._case.fault, Fault):
            return Outcome(Verdict.MISSED, "the fault was never reached")
        try:
            different = self._different(None)
        except Exception as error:
            return self._gives_up(error, STEPS, "end", "raised at the end")
        if different is None:
            return Outcome(Verdict.TAKEN, "nothing was raised")
        return Outcome(Verdict.SILENT, f"nothing was raised, and these differ: {_few(different)}")

    def _unsaid(self, error: BaseException) -> str:
        """Return the words missing in `step()`'s note on the state left by its error; empty if nothing is."""
        states = ("untouched", "begun", "broken")
        if not _is_in_step(error):
            # As where GradScaler looks for infinities, in a stand-in too.
            return ""
        if isinstance(self._case.fault, TooDeep) or (
            isinstance(self._case.fault, NoMemory) and _calls_of_ours(error) <= _CALLS_BEFORE_NOTES
        ):
            # A note takes frames, and there are none; it makes calls before all others.
            return ""
        notes = " ".join(getattr(error, "__notes__", ()))
        if not hasattr(self._optimizer, "status") or any(state in notes for state in states):
            return ""
        return f"no note names one of {states}: {told_of(error)} {notes}"

    def _interrupted(self) -> AbstractContextManager[object]:
        fault = self._case.fault
        here = isinstance(fault, Interrupt | TooDeep) or (isinstance(fault, NoMemory) and fault.on_main)
        return fault.comes(self._injector) if here else nullcontext()

    def _after(self, step: int, phase: str) -> Outcome:
        """Take the case's action after the fault in `phase` of `step`, train on, and compare."""
        status = getattr(self._optimizer, "status", None)
        told = f"raised in step {step}, {phase}, status {status}"
        self._injector.enter(STEPS, "after")
        try:
            # A call without memory, too, may come between two lines of GradScaler's, behind those of the step.
            lacked_memory = isinstance(self._case.fault, NoMemory) and status == "begun"
            self._trainee.recover(interrupted=self._is_interrupted or lacked_memory)
            closed = self._act(step, phase, status)
            if closed is not None:
                return closed
        except Exception as later:
            return self._gives_up(later, step, phase, told)
        redone = phase in ("forward", "backward") and self._case.action == "again"
        allowed = {"taken"} if redone else self._allowed(phase, status)
        left_out = {"taken": None, "skipped": step}
        try:
            found = {which: self._different(left_out[which]) for which in sorted(allowed)}
        except Exception as later:
            return self._gives_up(later, step, phase, told)
        exact = [which for which, different in found.items() if different is None]
        if exact and self._seen not in (None, exact[0]) and not redone:
            return Outcome(Verdict.TORN, f"{told}: the state_dict was of {self._seen}, the end of {exact[0]}")
        if exact:
            return Outcome(Verdict.TAKEN if exact[0] == "taken" else Verdict.SKIPPED, told)
        if self._seen == "torn":
            return Outcome(Verdict.TORN, told)
        unlike = "; ".join(f"not as if {which}: {_few(different)}" for which, different in found.items())
        return Outcome(Verdict.SILENT, f"{told}: {unlike}")

    def _allowed(self, phase: str, status: str | None) -> set[str]:
        """Return which runs the end may equal, given the place of the fault and the optimizer's own words."""
        if phase == "forward" or (phase == "backward" and not self._case.setting.updates_in_backward):
            return {"skipped"}
        if phase in ("average", "zero_grad", "end"):
            return {"taken"}
        if phase == "backward" or self._is_interrupted:
            # An interrupt may have come before the step or after it; a backward that updates may not have begun to.
            return {"taken", "skipped"}
        if status == "begun":
            return {"taken"}
        if status == "untouched":
            return {"taken"} if self._case.action == "again" else {"skipped"}
        return {"taken", "skipped"}

    def _act(self, step: int, phase: str, status: str | None) -> Outcome | None:
        """Take the case's action and train on with the batches that are left."""
        action, optimizer = self._case.action, self._optimizer
        following = step + 1
        if phase == "end":
            optimizer.synchronize()
            return None
        if action == "close":
            optimizer.close()
            return self._weights_after_close(step, phase)
        if action == "again":
            if phase in ("forward", "backward"):
                following = step
            elif phase == "step":
                # GradScaler looks for infinities again, in gradients owned by a begun step.
                optimizer.step() if status == "begun" else self._trainee.step()
        elif action == "state_dict":
            self._look(step, phase)
        elif action == "synchronize":
            optimizer.synchronize()
        elif action == "forward" and following < STEPS:
            loss = self._trainee.loss(following)
            self._trainee.zero_grad()
            self._trainee.train(following, lambda *_: None, loss)
            following += 1
        self._trainee.zero_grad()
        for index in range(following, STEPS):
            self._trainee.train(index, lambda *_: None)
        # The last batch's may be the failed one.
        self._trainee.take_average()
        return None

    def _look(self, step: int, phase: str) -> None:
        with self._injector.quietly():
            seen = self._trainee.snapshot()
            may_be = {"taken": min(step + 1, STEPS)}
            if phase not in ("average", "zero_grad"):
                may_be["skipped"] = step
            found = [which for which, stop in may_be.items() if self._is_after(stop, seen)]
            # A batch whose gradients overflow changes nothing: then it is both.
            self._seen = "torn" if not found else found[0] if len(found) == 1 else None

    def _is_after(self, stop: int, seen: Snapshot) -> bool:
        wanted = undisturbed_until(self._case.setting, stop)
        return not differing(seen, {name: wanted[name] for name in wanted.keys() & seen.keys()})

    @property
    def _may_break(self) -> bool:
        return self._injector.may_break or self._case.fault.may_break

    def _weights_after_close(self, step: int, phase: str) -> Outcome:
        with self._injector.quietly():
            try:
                seen = self._trainee.weights()
            except RuntimeError as error:
                if self._may_break:
                    return Outcome(Verdict.BROKEN, f"a lost device keeps weights after close(): {error}")
                raise
            runs = {Verdict.SKIPPED: step, Verdict.TAKEN: step + 1}
            for verdict, stop in runs.items():
                if self._is_after(stop, seen):
                    return Outcome(verdict, f"raised in step {step}, {phase}, then closed")
        if self._may_break:
            return Outcome(Verdict.BROKEN, f"raised in step {step}, {phase}, then closed")
        return Outcome(
            Verdict.SILENT, f"raised in step {step}, {phase}: after close() weights of neither run"
        )

    def _gives_up(self, later: BaseException, step: int, phase: str, told: str) -> Outcome:
        """Judge an error after the fault: may the optimizer give up, and does it say so everywhere?"""
        told = f"{told}; later {told_of(later)}"
        self._said += all_of(later)
        # They may come before the first line of step().
        may_precede = isinstance(self._case.fault, Interrupt | NoMemory | TooDeep)
        before_step = ("backward", "step") if may_precede else ("backward",)
        if phase in before_step and self._case.setting.updates_in_backward:
            return self._refuses(step, phase, told)
        status = getattr(self._optimizer, "status", None)
        if not self._may_break or status not in (None, "broken"):
            return Outcome(Verdict.STUCK, f"{told}; status {status}")
        for name in ("state_dict", "step", "synchronize", "state_dict"):
            try:
                self._look(step, phase) if name == "state_dict" else getattr(self._optimizer, name)()
            except Exception as error:
                if not self._injector.names(error):
                    return Outcome(
                        Verdict.STUCK, f"{told}; {name}() does not name the fault: {told_of(error)}"
                    )
            else:
                verdict = Verdict.TORN if self._seen == "torn" else Verdict.STUCK
                return Outcome(verdict, f"{told}; and yet {name}() returned")
        return Outcome(Verdict.BROKEN, told)

    def _refuses(self, step: int, phase: str, told: str) -> Outcome:
        """Judge an optimizer that has used some gradients of a failed backward.

        It can neither take the batch nor leave it out, and need not know why backward failed. So it is enough that it
        refuses to drop the gradients, as it just has, and to save the state.
        """
        try:
            self._look(step, phase)
        except Exception:
            return Outcome(Verdict.BROKEN, told)
        return Outcome(
            Verdict.TORN if self._seen == "torn" else Verdict.STUCK, f"{told}; yet state_dict() returned"
        )

    def remedied(self) -> Outcome:
        """Follow the error of a lost optimizer: load the last checkpoint into a new one, and train on."""
        if not any(words in self._said for words in ("try ", "load the last checkpoint")):
            return Outcome(Verdict.UNSAID, f"no remedy is named: {self._said}")
        setting, trainee = self._case.setting, self._trainee
        with injection.undisturbed.run():
            if self._injector.fault is not None:
                # With the device the process is lost, and with it the model.
                trainee = Trainee(setting, lambda _: None)
            else:
                trainee.recover(interrupted=True)
                trainee.build()
            try:
                trainee.zero_grad()
                trainee.load(checkpoint(setting, self._step))
                train(trainee, Injector(), self._step)
                trainee.take_average()
                found = trainee.snapshot() | trainee.averages()
            except Exception as error:
                return Outcome(Verdict.STUCK, f"the remedy fails: {told_of(error)}, after {self._said}")
            finally:
                trainee.optimizer.close()
        if different := differing(found, undisturbed(setting, None)):
            return Outcome(Verdict.SILENT, f"the remedy was taken, and {_few(different)}")
        return Outcome(Verdict.BROKEN, f"and the remedy helps: {self._said[:160]}")

    def _different(self, left_out: int | None) -> list[str] | None:
        """Return the differences from the undisturbed run; None if nothing does."""
        with self._injector.quietly():
            found = self._trainee.snapshot() | self._trainee.averages()
            return differing(found, undisturbed(self._case.setting, left_out)) or None


def undisturbed_until(setting: Setting, stop: int) -> Snapshot:
    """Return the tensors of the undisturbed run after `stop` batches."""
    return undisturbed(setting, None, stop)


@cache
def checkpoint(setting: Setting, stop: int) -> dict[str, Any]:
    """Return the checkpoint of an undisturbed run after `stop` batches, as `Trainee.load` takes it."""
    with injection.undisturbed.run(), opened(setting, injector := Injector()) as trainee:
        train(trainee, injector, 0, stop=stop)
        return trainee.saved()


def all_of(error: BaseException | None) -> str:
    """Return all that an error and its causes say, with their notes."""
    said = ""
    while error is not None:
        said += " ".join((str(error), *getattr(error, "__notes__", ()), ""))
        error = error.__cause__ or error.__context__
    return said


def _is_in_step(error: BaseException) -> bool:
    """Return whether `error` has come through an optimizer's `step()`, which `optimizers.step.hooked` has wrapped."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        frame.name == "call" and frame.filename.endswith("/reference_impl/optimizers/step.py")
        for frame in frames
    )


def _calls_of_ours(error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return sum("/reference_impl/" in frame.filename for frame in frames)


def _few(names: list[str] | None) -> str:
    listed = names or []
    return f"{len(listed)} differ, such as {', '.join(listed[:4])}"


def told_of(error: BaseException) -> str:
    """Return an error in one line, with where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1:] or [None]
    where = f" ({last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno})" if last[0] else ""
    return f"{type(error).__name__}: {str(error)[:160]}{where}"
