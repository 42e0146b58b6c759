# SPDX-License-Identifier: Apache-2.0
"""Construction and `close` of the offloaders of activations, checkpoints and frozen weights, failed at any place.

An interrupted construction leaves the model as it was: the same call works then, and everything is given back.
A close that was interrupted is called again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from calls import ALSO, SIGNALS
from injector import Injector
from interrupts import Interrupt, counted, of_package
from judge import Outcome, Verdict, told_of
from leftovers import Leftovers, hooks_of
from memory_cases import STEPS, WAYS, Trainee, Way, directory_of, plain
from python_faults import OTHERS_FRAMES, NoMemory, TooDeep, calls_counted, deeper, frames_counted
from settings import differing, shuffled

CALLS = ("construct", "close")
# Behind a batch whose backward has not begun, or none.
BATCHES = 2


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    way: Way
    call: str
    fault: Interrupt | NoMemory | TooDeep

    def __str__(self) -> str:
        return f"{self.way.name}: {self.call}: {self.fault}"


class Program:
    """A model that has come to a call."""

    def __init__(self, way: Way, call: str, directory: str) -> None:
        self.way, self.call, self._directory = way, call, directory
        self.trainee = Trainee(way, Injector())
        self.hooks = hooks_of(self.trainee.model)
        self.offloader: Any = None
        if call == "close":
            self.wrap()
            self.trainee.train(0, stop=BATCHES)

    def wrap(self) -> None:
        """Construct the offloader."""
        self.offloader = self.way.wrap(self.trainee.model, self._directory)

    def run(self) -> None:
        """Call."""
        self.wrap() if self.call == "construct" else self.offloader.close()

    def close(self) -> None:
        """Give everything back."""
        if self.offloader is not None:
            self.offloader.close()


@contextmanager
def _come(way: Way, call: str) -> Iterator[Program]:
    with directory_of(way) as directory:
        program = Program(way, call, directory)
        try:
            yield program
        finally:
            program.close()


@cache
def sizes(way: Way, call: str) -> tuple[int, int, int]:
    """Return how many bytecodes a call takes, how many calls it makes, and how many frames deep it goes."""
    with _come(way, call) as program, counted(None, lambda: None, of=of_package(ALSO)) as bytecodes:
        program.run()
    with _come(way, call) as program, calls_counted(None, lambda where: None, on_main=True) as calls:
        program.run()
    with _come(way, call) as program, frames_counted(injector := Injector()) as deepest:
        injector.enter(0, call)
        program.run()
    return bytecodes[0], calls[0], deepest[0, call]


def case_of(seed: int, *, signals: bool) -> Case:
    """Return the case of a seed: a signal in a call, or a fault of Python's."""
    random = shuffled(seed)
    way, call = WAYS[seed // len(CALLS) % len(WAYS)], CALLS[seed % len(CALLS)]
    bytecodes, calls, depth = sizes(way, call)
    fault: Interrupt | NoMemory | TooDeep
    if signals:
        fault = Interrupt(random.randint(1, bytecodes), also=ALSO, number=random.choice(SIGNALS))
    elif random.random() < 0.3:
        fault = TooDeep(random.randint(2, max(depth - 1, 2)))
    else:
        fault = NoMemory(random.randint(1, calls), on_main=True)
    return Case(way, call, fault)


def judge(case: Case) -> Outcome:
    """Run a case."""
    plain(case.way, None)
    sizes(case.way, case.call)
    before = Leftovers.now()
    outcome = deeper(OTHERS_FRAMES if isinstance(case.fault, TooDeep) else 0, lambda: _judged(case))
    if outcome.verdict.passes and (left := before.more_than()):
        return Outcome(Verdict.LEAK, f"{outcome.detail}; after close() stay: {left}")
    return outcome


def _judged(case: Case) -> Outcome:
    injector, told = Injector(), "nothing was raised"
    with directory_of(case.way) as directory:
        program = Program(case.way, case.call, directory)
        try:
            with case.fault.comes(injector):
                program.run()
        except (Exception, KeyboardInterrupt) as error:
            told = told_of(error)
            if injector.error is None or not injector.names(error):
                return Outcome(Verdict.STUCK, f"the fault is not named: {told}")
        try:
            return _after(case, program, told)
        except Exception as later:
            return Outcome(Verdict.STUCK, f"{told}; later {told_of(later)}")


def _after(case: Case, program: Program, told: str) -> Outcome:
    """Close all objects, do the same again, train to the end, and close."""
    trainee, first = program.trainee, BATCHES if case.call == "close" else 0
    program.close()
    trainee.train(first, stop=first + 1)
    program.wrap()
    trainee.train(first + 1, stop=STEPS)
    program.close()
    if different := differing(trainee.snapshot(), plain(case.way, None)):
        return Outcome(Verdict.SILENT, f"{told}; {len(different)} weights differ from the plain run")
    if hooks_of(trainee.model) > program.hooks:
        return Outcome(
            Verdict.LEAK, f"{told}; {hooks_of(trainee.model)} hooks on the model, not {program.hooks}"
        )
    return Outcome(Verdict.TAKEN, told)
