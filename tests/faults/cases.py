# SPDX-License-Identifier: Apache-2.0
"""Chooses the case of a seed: the training, the fault and its time, and the program's next action."""

from __future__ import annotations

from functools import cache

from injector import WORKER, Fault, Injector, Moment, OnceBegun, some_kind
from interrupts import Interrupt, counted, seconds_of
from judge import ACTIONS, FAULTY_STEPS, Case, opened, train
from python_faults import NoMemory, TooDeep, calls_counted, frames_counted
from settings import STEPS, Setting, shuffled

from reference_impl.device import Device

SEEDS_A_SETTING = 5


@cache
def visits(setting: Setting) -> dict[Moment, int]:
    """Return how often each seam is visited in each moment of an undisturbed run."""
    injector = Injector()
    with injector.installed(Device.of("cpu")), opened(setting, injector) as trainee:
        train(trainee, injector, 0)
        injector.enter(STEPS, "end")
        trainee.optimizer.synchronize()
    return dict(injector.visits)


def _setting(seed: int, matrix: list[Setting]) -> Setting:
    # Neighbours share a setting, so that undisturbed runs serve several; 59 takes them through the whole matrix.
    return matrix[seed // SEEDS_A_SETTING * 59 % len(matrix)]


def case_of(seed: int, *, matrix: list[Setting]) -> Case:
    """Return the case of a seed: the training, of `matrix`, the fault, its time, and the program's next action."""
    random, setting = shuffled(seed), _setting(seed, matrix)
    counted = visits(setting)
    # The contract is about the step itself, so it gets half of all faults.
    moments = [m for m in counted if m.step in FAULTY_STEPS or m.seam.endswith(WORKER)]
    kinds = sorted({(m.phase, m.seam) for m in moments})
    by_phase = {"step": 6.0, "zero_grad": 1.0, "": 4.0}
    weights = [by_phase.get(phase, 2.0) * (0.3 if seam == "order" else 1.0) for phase, seam in kinds]
    phase, seam = random.choices(kinds, weights)[0]
    moment = random.choice(sorted(m for m in moments if (m.phase, m.seam) == (phase, seam)))
    nth = random.randint(1, counted[moment])
    if seam.endswith(WORKER):
        # Neither the first step nor the last.
        each = counted[moment] // STEPS
        nth = random.randint(each + 1, max(counted[moment] - each, each + 1))
    return Case(setting, Fault(moment, nth, some_kind(random, seam)), random.choice(ACTIONS))


def begun_case_of(seed: int, *, matrix: list[Setting]) -> Case:
    """Return the case of a seed in which nothing may allocate once a step has begun, and nothing should."""
    setting = matrix[seed * 59 % len(matrix)]
    with opened(setting, Injector()):
        # Objects that are made once and stay, such as a process group, are made before the case.
        pass
    return Case(setting, OnceBegun(), shuffled(seed).choice(ACTIONS))


@cache
def bytecodes(setting: Setting) -> tuple[int, int]:
    """Return how many bytecodes of the package run before the faulty steps, and until their end."""
    with opened(setting, injector := Injector()) as trainee, counted(None, lambda: None) as count:
        train(trainee, injector, 0, stop=FAULTY_STEPS.start)
        before = count[0]
        train(trainee, injector, FAULTY_STEPS.start, stop=FAULTY_STEPS.stop)
        return before, count[0]


@cache
def duration_s(setting: Setting) -> float:
    """Return how long training takes."""
    with opened(setting, injector := Injector()) as trainee:
        return seconds_of(lambda: train(trainee, injector, 0))


def interrupted_case_of(seed: int, *, matrix: list[Setting], is_timed: bool) -> Case:
    """Return the case of a seed with a SIGINT: at a bytecode, or after a time if it `is_timed`."""
    random, setting = shuffled(seed), _setting(seed, matrix)
    if is_timed:
        interrupt = Interrupt(None, random.random() * duration_s(setting))
    else:
        before, until = bytecodes(setting)
        interrupt = Interrupt(random.randint(before + 1, until))
    # Whether a step has been taken, a program that was interrupted does not know: so it does not step again.
    action = random.choice(
        ("state_dict", "state_dict", "state_dict", "skip", "synchronize", "forward", "close")
    )
    return Case(setting, interrupt, action)


@cache
def calls(setting: Setting, on_main: bool) -> tuple[int, int]:
    """Return how many calls, as `NoMemory` counts them, are made before the faulty steps, and until their end."""
    injector = Injector()
    if not on_main:
        with (
            calls_counted(None, lambda where: None, on_main=False) as count,
            opened(setting, injector) as trainee,
        ):
            train(trainee, injector, 0, stop=FAULTY_STEPS.start)
            trainee.optimizer.synchronize()
            before = count[0]
            train(trainee, injector, FAULTY_STEPS.start, stop=FAULTY_STEPS.stop)
            return before, count[0]
    with (
        opened(setting, injector) as trainee,
        calls_counted(None, lambda where: None, on_main=True) as count,
    ):
        train(trainee, injector, 0, stop=FAULTY_STEPS.start)
        before = count[0]
        train(trainee, injector, FAULTY_STEPS.start, stop=FAULTY_STEPS.stop)
        return before, count[0]


@cache
def depths(setting: Setting) -> dict[tuple[int, str], int]:
    """Return how many frames deep each phase of an undisturbed run goes."""
    with opened(setting, injector := Injector()) as trainee:
        with frames_counted(injector) as deepest:
            train(trainee, injector, 0)
        return deepest


def python_case_of(seed: int, *, matrix: list[Setting]) -> Case:
    """Return the case of a seed in which a call of the package has no memory, or a phase no frames."""
    random, setting = shuffled(seed), _setting(seed, matrix)
    fault: NoMemory | TooDeep
    if random.random() < 0.3:
        deepest = depths(setting)
        moments = sorted(at for at in deepest if at[0] in FAULTY_STEPS)
        weights = [3.0 if phase == "step" else 1.0 for _, phase in moments]
        at = random.choices(moments, weights)[0]
        fault = TooDeep(random.randint(2, max(deepest[at] - 1, 2)), *at)
    else:
        before, until = calls(setting, on_main := random.random() < 0.6)
        if before == until:
            # It has no threads.
            before, until = calls(setting, on_main := True)
        fault = NoMemory(random.randint(before + 1, until), on_main)
    return Case(setting, fault, random.choice(ACTIONS))
