# SPDX-License-Identifier: Apache-2.0
"""One call of the optimizer's, interrupted or failed at any place in it: construction, `load_state_dict`, `close`, ...

The call comes after `BATCHES` batches (construction: before any). A signal, of any number whose handler raises, comes
before one of the call's bytecodes, or the call has no memory or no frames at some place in it. The program then calls
again, or looks at the state first, and trains on. Its end equals, bit for bit, the run in which nothing
happened; the state that it saw in between is the one before the call or behind it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from injector import Injector
from injector import undisturbed as quiet
from interrupts import AROUND_A_STEP, Interrupt, counted, of_package
from judge import Outcome, Snapshot, Verdict, checkpoint, told_of, train, undisturbed, undisturbed_until
from leftovers import Leftovers, hooks_of
from python_faults import OTHERS_FRAMES, NoMemory, TooDeep, calls_counted, deeper, frames_counted
from settings import Setting, Trainee, differing, shuffled

from reference_impl.optimizers.step import WorkLostError

# The last of them has been stepped with, and its gradients are still there.
BATCHES = 3
CALLS = ("construct", "step", "zero_grad", "synchronize", "state_dict", "load_state_dict", "close")
# The number of batches behind a loaded checkpoint.
LOADED_BATCHES = 1
# Torch's own code that runs between the bytecodes of the package.
ALSO = (*AROUND_A_STEP, "torch/utils/hooks.py", "torch/utils/_contextlib.py", "torch/autograd/grad_mode.py")
# Errors that programs catch, some of them rarely.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGXCPU", "SIGIO", "SIGURG", "SIGPIPE")
SIGNALS = (*(int(getattr(signal, name)) for name in _NAMES), int(signal.SIGRTMIN) + 3)
SEEDS_A_SETTING = 7


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    setting: Setting
    call: str
    fault: Interrupt | NoMemory | TooDeep
    looks: bool

    def __str__(self) -> str:
        after = "looks" if self.looks else "calls again"
        return f"{self.setting}: {self.call}: {self.fault}, then {after}"


class Program:
    """A trainee that has come to a call."""

    def __init__(self, setting: Setting, call: str) -> None:
        self.call = call
        self.trainee = Trainee(setting, lambda _: None, is_built=call != "construct")
        if call == "construct":
            return
        for index in range(BATCHES):
            self.trainee.train(index, lambda *_: None, zeroes=index < BATCHES - 1, steps=self._steps(index))
        if call == "load_state_dict":
            self.trainee.zero_grad()
            self.trainee.model.load_state_dict(checkpoint(setting, LOADED_BATCHES)["model"])

    def _steps(self, index: int) -> bool:
        return self.call != "step" or index < BATCHES - 1

    def run(self) -> None:
        """Call."""
        trainee = self.trainee
        if self.call == "construct":
            trainee.build()
        elif self.call == "step":
            trainee.step()
        elif self.call == "load_state_dict":
            trainee.optimizer.load_state_dict(checkpoint(trainee.setting, LOADED_BATCHES)["optimizer"])
        else:
            getattr(trainee.optimizer, self.call)()

    def close(self) -> None:
        """Give everything back."""
        if self.trainee.optimizer is not None:
            self.trainee.optimizer.close()


@contextmanager
def _come(setting: Setting, call: str) -> Iterator[Program]:
    program = Program(setting, call)
    try:
        yield program
    finally:
        program.close()


@cache
def bytecodes(setting: Setting, call: str) -> int:
    """Return how many bytecodes the call takes."""
    with _come(setting, call) as program, counted(None, lambda: None, of=of_package(ALSO)) as count:
        program.run()
    return count[0]


@cache
def calls(setting: Setting, call: str) -> int:
    """Return how many calls, as `NoMemory` counts them, the call makes."""
    with _come(setting, call) as program, calls_counted(None, lambda where: None, on_main=True) as count:
        program.run()
    return count[0]


@cache
def depth(setting: Setting, call: str) -> int:
    """Return how many frames deep the call goes."""
    injector = Injector()
    with _come(setting, call) as program, frames_counted(injector) as deepest:
        injector.enter(0, call)
        program.run()
    return deepest[0, call]


def case_of(seed: int, *, matrix: list[Setting], signals: bool) -> Case:
    """Return the case of a seed: a signal in a call, or a fault of Python's."""
    random = shuffled(seed)
    setting = matrix[seed // SEEDS_A_SETTING * 59 % len(matrix)]
    call = CALLS[seed % len(CALLS)]
    fault: Interrupt | NoMemory | TooDeep
    if signals:
        place = random.randint(1, bytecodes(setting, call))
        fault = Interrupt(place, also=ALSO, number=random.choice(SIGNALS))
    elif random.random() < 0.3:
        fault = TooDeep(random.randint(2, max(depth(setting, call) - 1, 2)))
    else:
        fault = NoMemory(random.randint(1, calls(setting, call)), on_main=True)
    return Case(setting, call, fault, random.random() < 0.5)


@cache
def hooks_left(setting: Setting) -> int:
    """Return how many hooks a closed optimizer leaves on a model that has trained: the user's, and FSDP2's."""
    with quiet.run():
        program = Program(setting, "construct")
        program.run()
        train(program.trainee, Injector(), 0)
        program.close()
        return hooks_of(program.trainee.model)


@cache
def half_loaded(setting: Setting) -> Snapshot:
    """Return the state once the weights of a checkpoint have been loaded, and not its states."""
    with quiet.run(), _come(setting, "load_state_dict") as program:
        return program.trainee.snapshot()


def judge(case: Case) -> Outcome:
    """Run a case."""
    # References are made, and late imports come, before the leftovers are counted.
    undisturbed(case.setting, None)
    hooks_left(case.setting)
    with _come(case.setting, case.call) as program:
        program.run()
    del program
    before = Leftovers.now()
    outcome = deeper(OTHERS_FRAMES if isinstance(case.fault, TooDeep) else 0, lambda: _judged(case))
    if outcome.verdict.passes and (left := before.more_than()):
        return Outcome(Verdict.LEAK, f"{outcome.detail}; after close() stay: {left}")
    return outcome


def _judged(case: Case) -> Outcome:
    injector, program = Injector(), Program(case.setting, case.call)
    trainee = program.trainee
    try:
        with case.fault.comes(injector):
            program.run()
        told = "nothing was raised"
    except (Exception, KeyboardInterrupt) as error:
        if injector.error is None:
            return Outcome(Verdict.CRASH, told_of(error))
        if not injector.names(error):
            return Outcome(Verdict.STUCK, f"the fault is not named: {told_of(error)}")
        told = told_of(error)
    try:
        outcome = _AFTER.get(case.call, _after_a_reading)(case, program, told)
    except Exception as later:
        status = getattr(trainee.optimizer, "status", None)
        is_lost = injector.may_break and status == "broken" and injector.names(later)
        outcome = Outcome(
            Verdict.BROKEN if is_lost else Verdict.STUCK, f"{told}; later {told_of(later)}; status {status}"
        )
    try:
        program.close()
    except Exception as error:
        if outcome.verdict.passes:
            outcome = Outcome(Verdict.STUCK, f"{told}; close() raised {told_of(error)}")
    if outcome.verdict.passes and (hooks := hooks_of(trainee.model)) > hooks_left(case.setting):
        return Outcome(Verdict.LEAK, f"{told}; hooks on the model: {hooks}, not {hooks_left(case.setting)}")
    return outcome


def _same(found: Snapshot, setting: Setting, stop: int) -> list[str]:
    """Return the differences from the run of `stop` batches."""
    wanted = undisturbed_until(setting, stop)
    return differing(found, {name: wanted[name] for name in wanted.keys() & found.keys()})


def _trained_on(case: Case, trainee: Trainee, told: str, first: int, left_out: int | None = None) -> Outcome:
    """Train with the batches from `first` and compare the end."""
    train(trainee, Injector(), first)
    if different := differing(trainee.snapshot(), _without_averages(case.setting, left_out)):
        return Outcome(Verdict.SILENT, f"{told}: {len(different)} differ at the end, such as {different[:3]}")
    return Outcome(Verdict.TAKEN if left_out is None else Verdict.SKIPPED, told)


def _without_averages(setting: Setting, left_out: int | None) -> Snapshot:
    return {
        name: each
        for name, each in undisturbed(setting, left_out).items()
        if not name.startswith("average of ")
    }


def _after_construct(case: Case, program: Program, told: str) -> Outcome:
    """The model is as it was: the same calls build another optimizer, which trains."""
    program.close()
    program.trainee.build()
    return _trained_on(case, program.trainee, told, 0)


def _after_step(case: Case, program: Program, told: str) -> Outcome:
    """The step has happened or has not; `status` is not looked at."""
    trainee = program.trainee
    trainee.recover(interrupted=True)
    is_deep = isinstance(case.fault, TooDeep) and case.setting.updates_in_backward
    if is_deep and trainee.optimizer.status == "begun":
        # With two frames nothing of the call can be noted: then the state is refused, and this is advised.
        trainee.optimizer.step()
    seen = trainee.snapshot()
    which = next((stop for stop in (BATCHES, BATCHES - 1) if not _same(seen, case.setting, stop)), None)
    if which is None:
        return Outcome(Verdict.TORN, f"{told}: the state is that of neither run")
    trainee.zero_grad()
    return _trained_on(case, trainee, told, BATCHES, None if which == BATCHES else BATCHES - 1)


def _after_a_reading(case: Case, program: Program, told: str) -> Outcome:
    """Nothing has changed; the call works now."""
    if not case.looks:
        program.run()
    trainee = program.trainee
    trainee.zero_grad()
    if different := _same(trainee.snapshot(), case.setting, BATCHES):
        return Outcome(Verdict.TORN, f"{told}: {len(different)} differ, such as {different[:3]}")
    return _trained_on(case, trainee, told, BATCHES)


def _after_load(case: Case, program: Program, told: str) -> Outcome:
    """All states are those of before, or all are loaded; loading again loads them."""
    trainee, setting = program.trainee, case.setting
    if case.looks:
        seen = trainee.snapshot()
        if differing(seen, half_loaded(setting)) and _same(seen, setting, LOADED_BATCHES):
            return Outcome(Verdict.TORN, f"{told}: some states are loaded, and some are not")
    trainee.load(checkpoint(setting, LOADED_BATCHES))
    return _trained_on(case, trainee, told, LOADED_BATCHES)


def _after_close(case: Case, program: Program, told: str) -> Outcome:
    """Closing again gives everything back; the weights are those behind the step, or it has been said to be lost."""
    trainee, is_lost = program.trainee, told.startswith(WorkLostError.__name__)
    program.close()
    different = _same(trainee.weights(), case.setting, BATCHES)
    if different and not is_lost:
        return Outcome(Verdict.SILENT, f"{told}: {len(different)} weights differ, such as {different[:3]}")
    # A closed object is in nobody's way.
    trainee.model.zero_grad()
    trainee.build()
    trainee.load(checkpoint(case.setting, BATCHES))
    outcome = _trained_on(case, trainee, told, BATCHES)
    return Outcome(Verdict.BROKEN, told) if is_lost and outcome.verdict.passes else outcome


_AFTER: dict[str, Callable[[Case, Program, str], Outcome]] = {
    "construct": _after_construct,
    "step": _after_step,
    "load_state_dict": _after_load,
    "close": _after_close,
}
