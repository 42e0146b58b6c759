# SPDX-License-Identifier: Apache-2.0
"""Faults under the offloaders of activations, checkpoints and frozen weights.

They hold nothing between steps, so a fault or a signal in forward or backward costs its batch at most. The program
leaves the batch out, or repeats it, and from then on everything equals, bit for bit, the plain model after the same
batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from injector import WORKER, Fault, Injector, Moment, some_kind, undisturbed
from interrupts import Interrupt, counted, of_package
from judge import Outcome, Verdict, told_of
from leftovers import Leftovers
from python_faults import OTHERS_FRAMES, NoMemory, TooDeep, calls_counted, deeper, frames_counted
from settings import differing, shuffled

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    limit_pinned_memory,
)
from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.pinned import pinned_book
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss

STEPS = 5
FAULTY_STEPS = range(STEPS - 1)
ACTIONS = ("skip", "skip", "again", "again", "close")
MIB = 2**20
_SMALL = {"min_bytes": 1024}
_LONG, _SHORT = (2, 128), (1, 24)


def _on_disk(model: Decoder, directory: str) -> Any:
    space = DiskSpace(path=directory, limit_bytes=64 * MIB, staging_bytes=2 * MIB)
    return ActivationOffloader(model, disk=space, host_limit_bytes=2 * MIB, **_SMALL)


@dataclass(frozen=True)
class Way:
    """One way to keep part of training on the host; `wrap` is given a model and an empty directory."""

    name: str
    shape: tuple[int, int]
    wrap: Callable[[Decoder, str], Any]
    lora: bool = False
    # Nothing may be pinned but the ring.
    is_limited: bool = False


WAYS = (
    Way("activations", _SHORT, lambda model, _: ActivationOffloader(model, **_SMALL)),
    Way(
        "activations of two layers",
        _SHORT,
        lambda model, _: ActivationOffloader(model, num_layers=2, **_SMALL),
    ),
    Way(
        "activations, little in flight",
        _SHORT,
        lambda model, _: ActivationOffloader(model, in_flight_bytes=4096, double_buffering=False, **_SMALL),
    ),
    Way(
        "activations and weights", _SHORT, lambda model, _: ActivationOffloader(model, weights=True, **_SMALL)
    ),
    Way("activations on disk", _LONG, _on_disk),
    Way("checkpoints", _SHORT, lambda model, _: CheckpointOffloader(model, **_SMALL)),
    Way(
        "checkpoints with kept products",
        _SHORT,
        lambda model, _: CheckpointOffloader(model, num_layers=2, keep=("core_attention", "qkv"), **_SMALL),
    ),
    *(
        Way(
            f"frozen weights, prefetch {prefetch}",
            _SHORT,
            lambda model, _, prefetch=prefetch: FrozenLayerStreamer(model, prefetch=prefetch),
            lora=True,
        )
        for prefetch in (0, 1, 2)
    ),
    Way(
        "frozen weights in pageable memory",
        _SHORT,
        lambda model, _: FrozenLayerStreamer(model),
        lora=True,
        is_limited=True,
    ),
    Way(
        "checkpoints in pageable memory",
        _SHORT,
        lambda model, _: CheckpointOffloader(model, **_SMALL),
        is_limited=True,
    ),
)


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    way: Way
    fault: Fault | Interrupt | NoMemory | TooDeep
    action: str

    def __str__(self) -> str:
        return f"{self.way.name}: {self.fault}, then {self.action}"


class Trainee:
    """A small decoder, plain AdamW and batches."""

    def __init__(self, way: Way, injector: Injector) -> None:
        torch.manual_seed(3)
        self.model = Decoder(DecoderShape(layers=3, vocab=64))
        if way.lora:
            add_lora(self.model, rank=4)
        self.injector = injector
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2, fused=True)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randint(64, way.shape, generator=generator) for _ in range(STEPS)]
        layer = self.model.layers[1]
        layer.register_forward_pre_hook(lambda *_: injector.visit("hook"))
        next(p for p in layer.parameters() if p.requires_grad).register_hook(lambda _: injector.visit("hook"))

    def train(self, first: int, left_out: int | None = None, *, stop: int = STEPS) -> None:
        """Train with the batches from `first`."""
        for index in range(first, stop):
            if index == left_out:
                continue
            self.injector.enter(index, "forward")
            loss = decoder_loss(self.model(self.batches[index]), self.batches[index])
            self.injector.enter(index, "backward")
            loss.backward()
            del loss
            self.injector.enter(index, "optimizer")
            with self.injector.quietly():
                self.optimizer.step()
                self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of the trained weights."""
        return {str(number): p.detach().clone() for number, p in enumerate(self.trained)}


@cache
def plain(way: Way, left_out: int | None) -> dict[str, torch.Tensor]:
    """Return the weights that plain training ends with."""
    with undisturbed.run():
        trainee = Trainee(way, Injector())
        trainee.train(0, left_out)
        return trainee.snapshot()


@contextmanager
def directory_of(way: Way) -> Iterator[str]:
    """Make an empty directory for `way`, and limit its pinned memory."""
    with tempfile.TemporaryDirectory() as directory:
        if not way.is_limited:
            yield directory
            return
        with limit_pinned_memory(MIB):
            others = HostArena(Device.of("cpu"))
            others.reserve(pinned_book.left_bytes() or 0)
            yield directory
            others.close()


@cache
def visits(way: Way) -> dict[Moment, int]:
    """Return how often each seam is visited in each moment of an undisturbed run."""
    injector = Injector()
    trainee = Trainee(way, injector)
    with directory_of(way) as directory, injector.installed(Device.of("cpu")):
        offloader = way.wrap(trainee.model, directory)
        trainee.train(0)
        injector.enter(STEPS, "close")
        offloader.close()
    assert differing(trainee.snapshot(), plain(way, None)) == []
    return dict(injector.visits)


def case_of(seed: int) -> Case:
    """Return the case of a seed."""
    random = shuffled(seed)
    way = WAYS[seed % len(WAYS)]
    found = visits(way)
    phases = ("forward", "backward")
    moments = [m for m in found if m.seam.endswith(WORKER) or (m.step in FAULTY_STEPS and m.phase in phases)]
    seams = sorted({(m.phase, m.seam) for m in moments})
    weights = [0.3 if seam == "order" else 1.0 for _, seam in seams]
    phase, seam = random.choices(seams, weights)[0]
    moment = random.choice(sorted(m for m in moments if (m.phase, m.seam) == (phase, seam)))
    count = found[moment]
    # In other threads not in the last step.
    nth = random.randint(1, max(count - count // STEPS, 1) if seam.endswith(WORKER) else count)
    return Case(way, Fault(moment, nth, some_kind(random, seam)), random.choice(ACTIONS))


# Whose begin and end a signal may cut in two. The optimizer is torch's own, which an interrupt may leave half done.
CONTEXTS = ("torch/autograd/graph.py", "torch/utils/_python_dispatch.py")


@cache
def bytecodes(way: Way) -> tuple[int, int]:
    """Return how many bytecodes of the package run before the second step, and until the last begins."""
    trainee = Trainee(way, Injector())
    with directory_of(way) as directory:
        offloader = way.wrap(trainee.model, directory)
        with counted(None, lambda: None, of=of_package(CONTEXTS)) as count:
            trainee.train(0, stop=1)
            before = count[0]
            trainee.train(1, stop=STEPS - 1)
        offloader.close()
    return before, count[0]


def interrupted_case_of(seed: int) -> Case:
    """Return the case of a seed with a SIGINT before a bytecode, always in forward or backward."""
    random = shuffled(seed)
    way = WAYS[seed % len(WAYS)]
    before, until = bytecodes(way)
    interrupt = Interrupt(random.randint(before + 1, until), also=CONTEXTS)
    return Case(way, interrupt, random.choice(ACTIONS))


@cache
def calls(way: Way, on_main: bool) -> tuple[int, int]:
    """Return how many calls, as `NoMemory` counts them, are made before the second step, and until the last begins."""
    trainee = Trainee(way, Injector())
    with directory_of(way) as directory, calls_counted(None, lambda where: None, on_main=on_main) as count:
        offloader = way.wrap(trainee.model, directory)
        trainee.train(0, stop=1)
        before = count[0]
        trainee.train(1, stop=STEPS - 1)
        until = count[0]
        offloader.close()
    return before, until


@cache
def depths(way: Way) -> dict[tuple[int, str], int]:
    """Return how many frames deep each phase goes."""
    trainee = Trainee(way, Injector())
    with directory_of(way) as directory:
        offloader = way.wrap(trainee.model, directory)
        with frames_counted(trainee.injector) as deepest:
            trainee.train(0)
        offloader.close()
    return deepest


def python_case_of(seed: int) -> Case:
    """Return the case of a seed in which a call of the package has no memory, or a phase no frames."""
    random = shuffled(seed)
    way = WAYS[seed % len(WAYS)]
    fault: NoMemory | TooDeep
    if random.random() < 0.3:
        deepest = depths(way)
        moments = sorted(at for at in deepest if at[0] in FAULTY_STEPS and at[1] in ("forward", "backward"))
        at = random.choice(moments)
        fault = TooDeep(random.randint(2, max(deepest[at] - 1, 2)), *at)
    else:
        before, until = calls(way, on_main := random.random() < 0.6)
        if before == until:
            # It has no threads.
            before, until = calls(way, on_main := True)
        fault = NoMemory(random.randint(before + 1, until), on_main)
    return Case(way, fault, random.choice(ACTIONS))


def judge(case: Case) -> Outcome:
    """Run a case."""
    # Late imports come before the leftovers are counted.
    plain(case.way, None)
    before = Leftovers.now()
    outcome = deeper(OTHERS_FRAMES if isinstance(case.fault, TooDeep) else 0, lambda: _judged(case))
    if outcome.verdict.passes and (left := before.more_than()):
        return Outcome(Verdict.LEAK, f"{outcome.detail}; after close() stay: {left}")
    return outcome


def _judged(case: Case) -> Outcome:
    fault = case.fault if isinstance(case.fault, Fault) else None
    injector = Injector(fault)
    trainee = Trainee(case.way, injector)
    with directory_of(case.way) as directory, _injected(case, injector):
        with injector.quietly():
            offloader = case.way.wrap(trainee.model, directory)
        outcome = _outcome(case, trainee, offloader, injector)
        injector.enter(STEPS, "close")
        try:
            offloader.close()
        except Exception as error:
            if outcome.verdict.passes:
                outcome = Outcome(Verdict.STUCK, f"close() raised {told_of(error)}")
    return outcome


def _injected(case: Case, injector: Injector) -> AbstractContextManager[object]:
    if isinstance(case.fault, Fault):
        return injector.installed(Device.of("cpu"))
    hears_threads = isinstance(case.fault, NoMemory) and not case.fault.on_main
    return case.fault.comes(injector) if hears_threads else nullcontext()


def _comes(case: Case, injector: Injector) -> AbstractContextManager[object]:
    fault = case.fault
    here = isinstance(fault, Interrupt | TooDeep) or (isinstance(fault, NoMemory) and fault.on_main)
    return fault.comes(injector) if here else nullcontext()


def _outcome(case: Case, trainee: Trainee, offloader: Any, injector: Injector) -> Outcome:
    try:
        with _comes(case, injector):
            trainee.train(0)
    except (Exception, KeyboardInterrupt) as error:
        if injector.error is None:
            return Outcome(Verdict.CRASH, told_of(error))
        if not injector.names(error):
            return Outcome(Verdict.STUCK, f"the fault is not named: {told_of(error)}")
        step, phase, told = injector.step, injector.phase, told_of(error)
        # It keeps the frames of the failed batch alive, and with them their saved tensors.
        del error
    else:
        # Which of the copies another thread makes is chance, so the fault may stay out.
        same = not differing(trainee.snapshot(), plain(case.way, None))
        return Outcome(Verdict.TAKEN if same else Verdict.SILENT, "nothing was raised")
    told = f"raised in step {step}, {phase}: {told}"
    injector.enter(STEPS, "after")
    trainee.optimizer.zero_grad()
    again = case.action == "again"
    try:
        if case.action == "close":
            offloader.close()
        trainee.train(step if again else step + 1)
    except Exception as later:
        # Weights that a lost device could not take back stay on the host, and their use says so.
        lost = case.fault.may_break and (injector.names(later) or "is not on the device" in str(later))
        return Outcome(Verdict.BROKEN if lost else Verdict.STUCK, f"{told}; later {told_of(later)}")
    with injector.quietly():
        different = differing(trainee.snapshot(), plain(case.way, None if again else step))
    if different:
        return Outcome(Verdict.SILENT, f"{told}; {len(different)} weights differ from the plain run")
    return Outcome(Verdict.TAKEN if again else Verdict.SKIPPED, told)
