# SPDX-License-Identifier: Apache-2.0
"""A second thread that reads the weights trained by the first one: evaluation, a logger, a saver.

It runs the model without gradients, takes `model.state_dict()` or the optimizer's, as often as it can, with pauses that
the seed chooses. When it gets to run is chance, so a seed repeats the pauses and not the outcome. Reading changes
nothing: neither thread may raise, and all weights and states equal, bit for bit, those of the run that nobody read. A
state saved by the reader belongs to a whole number of steps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from judge import Outcome, Verdict, told_of, undisturbed, undisturbed_until
from leftovers import Leftovers
from settings import STEPS, Setting, Trainee, differing, shuffled

READINGS = ("forward", "model", "both", "optimizer")
SEEDS_A_SETTING = 4
_SWITCHES_S = (1e-5, 1e-4, 5e-3)
_PAUSES_S = (0.0, 0.0, 1e-4, 1e-3)


@dataclass(frozen=True)
class Case:
    """One run of the campaign; the interpreter changes threads every `switch_s`."""

    setting: Setting
    reading: str
    switch_s: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.setting}: {self.reading} read every {self.pause_s} s, switch {self.switch_s} s"


def case_of(seed: int, *, matrix: list[Setting]) -> Case:
    """Return the case of a seed."""
    random = shuffled(seed)
    setting = matrix[seed // SEEDS_A_SETTING * 59 % len(matrix)]
    reading = READINGS[seed % len(READINGS)]
    return Case(setting, reading, random.choice(_SWITCHES_S), random.choice(_PAUSES_S))


def judge(case: Case) -> Outcome:
    """Run a case."""
    wanted = undisturbed(case.setting, None)
    wholes = [undisturbed_until(case.setting, stop) for stop in range(STEPS + 1)]
    before, switch_s = Leftovers.now(), sys.getswitchinterval()
    sys.setswitchinterval(case.switch_s)
    try:
        outcome = _judged(case, wanted, wholes)
    finally:
        sys.setswitchinterval(switch_s)
    if outcome.verdict.passes and (left := before.more_than()):
        return Outcome(Verdict.LEAK, f"after close() stay: {left}")
    return outcome


def _judged(case: Case, wanted: dict[str, torch.Tensor], wholes: list[dict[str, torch.Tensor]]) -> Outcome:
    trainee = Trainee(case.setting, lambda _: None)
    seen: list[dict[str, torch.Tensor]] = []
    failed: list[BaseException] = []
    stop = threading.Event()
    readings = _READINGS[case.reading]

    def read() -> None:
        try:
            while not stop.is_set():
                for reading in readings:
                    found = reading(trainee)
                    if found is not None:
                        seen.append(found)
                time.sleep(case.pause_s)
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for index in range(STEPS):
            trainee.train(index, lambda *_: None)
        trainee.optimizer.synchronize()
    except Exception as error:
        return _ended(trainee, Outcome(Verdict.STUCK, f"the trainer has raised {told_of(error)}"))
    finally:
        stop.set()
        reader.join()
    if failed:
        return _ended(trainee, Outcome(Verdict.STUCK, f"the reader has raised {told_of(failed[0])}"))
    different = differing(trainee.snapshot() | trainee.averages(), wanted)
    if different:
        return _ended(trainee, Outcome(Verdict.SILENT, f"{len(different)} differ, such as {different[:3]}"))
    for found in seen:
        if all(
            differing(found, {name: whole[name] for name in found.keys() & whole.keys()}) for whole in wholes
        ):
            return _ended(trainee, Outcome(Verdict.TORN, f"one of {len(seen)} saved states is of no run"))
    return _ended(trainee, Outcome(Verdict.TAKEN, f"{len(seen)} states were saved"))


def _ended(trainee: Trainee, outcome: Outcome) -> Outcome:
    try:
        trainee.optimizer.close()
    except Exception as error:
        if outcome.verdict.passes:
            return Outcome(Verdict.STUCK, f"close() raised {told_of(error)}")
    return outcome


def _forward(trainee: Trainee) -> None:
    with torch.no_grad():
        trainee.model(trainee.batches[0], everything=True)


def _model(trainee: Trainee) -> None:
    # They are the parameters' own memory, which the next step writes, as torch's is.
    trainee.model.state_dict()


def _optimizer(trainee: Trainee) -> dict[str, torch.Tensor] | None:
    try:
        state = trainee.optimizer.state_dict()["state"]
    except RuntimeError as refused:
        # The trainer follows the advice at the end.
        if any(words in str(refused) for words in _REFUSALS):
            return None
        raise
    return {f"{key}.{name}": value.clone() for key, each in state.items() for name, value in each.items()}


_REFUSALS = ("takes the steps; expected one thread", "after a backward that had started the update")
_READINGS: dict[str, tuple[Callable[[Trainee], Any], ...]] = {
    "forward": (_forward,),
    "model": (_model,),
    "both": (_model, _forward),
    "optimizer": (_optimizer,),
}
