# SPDX-License-Identifier: Apache-2.0
"""Mended faults, put back one at a time: the campaign must find each.

A mutation patches the package and never takes that back: it runs in a process of its own, see `campaign`. Each says
which seeds find it. Whoever mends a fault adds the patch that puts it back; most need only know whether a call has just
failed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from signal import SIGINT
from typing import Any, NamedTuple

import torch
from injector import Injector, undisturbed

from reference_impl.memory import interrupts
from reference_impl.memory.slots import Slots
from reference_impl.optimizers import engine, hybrid
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.shares import Shares
from reference_impl.optimizers.step import Failures
from reference_impl.optimizers.streamed import share
from reference_impl.optimizers.streamed.update import ChunkUpdate
from reference_impl.optimizers.writes.awaited import AwaitedParameter
from reference_impl.optimizers.writes.sums import WeightSums
from reference_impl.trained_layers import shards

Wrapper = Callable[..., Any]


class Mutation(NamedTuple):
    """The patch that puts a fault back, and the job of the campaign to notice it."""

    put_back: Callable[[], None]
    job: str = "optimizers:0:60"


def around(owner: Any, name: str) -> Callable[[Wrapper], None]:
    """Replace the method `name` of `owner` by a function that is given the method and its arguments."""
    real = getattr(owner, name)

    def replace(wrapper: Wrapper) -> None:
        setattr(owner, name, functools.wraps(real)(lambda *args, **options: wrapper(real, *args, **options)))

    return replace


def faults() -> list[str]:
    """Return a list to which the seam of each failed call will be appended."""
    failed: list[str] = []

    @around(Injector, "__init__")
    def begin(real: Wrapper, injector: Injector, fault: Any = None) -> None:
        real(injector, fault)
        # A new case begins, or the count of its visits.
        if not undisturbed.active:
            failed.clear()

    @around(Injector, "visit")
    def visit(real: Wrapper, injector: Injector, seam: str, **options: Any) -> None:
        try:
            real(injector, seam, **options)
        except BaseException:
            failed.append(seam)
            raise

    return failed


def once(failed: list[str]) -> bool:
    """Return whether a call has failed since this last said so."""
    if undisturbed.active or not failed:
        return False
    failed.clear()
    return True


def kernel_done_twice() -> None:
    """A kernel that has failed had an effect already, as if progress were recorded before the operations."""

    @around(Adam, "update")
    def update(real: Wrapper, *args: Any, **options: Any) -> None:
        real(*args, **options)
        if once(failed):
            real(*args, **options)

    failed = faults()


def chunk_recorded_first() -> None:
    """The chunk whose update fails counts as updated: its update is left out the next time."""

    @around(ChunkUpdate, "run")
    def run(real: Wrapper, *args: Any) -> None:
        if not once(failed):
            real(*args)

    failed = faults()


def slots_kept() -> None:
    """From an error on slots are not given back: one alone costs speed, since two are enough to go on."""

    @around(Slots, "give_back")
    def give_back(real: Wrapper, *args: Any, **options: Any) -> None:
        if undisturbed.active or not failed:
            real(*args, **options)

    failed = faults()


def flag_never_set() -> None:
    """After an error nobody tells the waiters for a parameter of its arrival."""

    @around(Publisher, "release")
    def release(real: Wrapper, *args: Any) -> None:
        if not once(failed):
            real(*args)

    failed = faults()


def decision_kept() -> None:
    """The clip decision of a step that has failed is used in the next."""
    failed, last = faults(), []

    @around(engine, "decide")
    def decide(real: Wrapper, *args: Any, **options: Any) -> Any:
        last.append(real(*args, **options))
        return last[-2] if once(failed) and len(last) > 1 else last[-1]


def job_dropped() -> None:
    """After an error the jobs that are submitted next are lost."""

    @around(DeadlineWorkers, "submit")
    def submit(real: Wrapper, workers: Any, jobs: Any) -> None:
        real(workers, [] if once(failed) else jobs)

    failed = faults()


def worker_error_swallowed() -> None:
    """A worker goes on as if its task had been done."""

    @around(DeadlineWorkers, "run_job")
    def run_job(real: Wrapper, *args: Any) -> None:
        with suppress(MemoryError, RuntimeError):
            real(*args)


def step_counted_twice() -> None:
    """A step that is taken again counts twice."""

    @around(torch, "_foreach_add_")
    def add(real: Wrapper, tensors: Any, other: Any) -> Any:
        result = real(tensors, other)
        return real(tensors, other) if once(failed) else result

    failed = faults()


def lost_device_hides_the_rest() -> None:
    """Closing streamed shards stops where the device is lost."""
    shards.past_a_lost_device = nullcontext


def rates_of_the_next_batch() -> None:
    """A begun step is carried out with the hyper-parameters of the moment."""
    share.snapshot = engine.snapshot = hybrid.snapshot = list


def allocated_after_the_begin() -> None:
    """A step's memory is allocated once it has begun."""
    real = Shares.begin

    def begin(shares: Any) -> None:
        torch.empty(16)
        real(shares)

    Shares.begin = begin  # type: ignore[method-assign]


def few_signals_are_deferred() -> None:
    """A region defers Ctrl-C, and no other signal."""
    interrupts._SIGNALS = [int(SIGINT)]


def writes_are_not_compared() -> None:
    """Masters on the CPU follow no write that nothing counts."""

    @around(WeightSums, "compare")
    def compare(real: Wrapper, *args: Any) -> Any:
        return real(*args) if undisturbed.active else None


def nobody_waits_to_read_a_weight() -> None:
    """Behind an attached step whoever reads a weight that is on its way finds it as it is."""
    real = AwaitedParameter.__torch_function__

    def read(cls: type, func: Wrapper, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if undisturbed.active or func is not torch.Tensor.detach:
            return real(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)

    @around(DeadlineWorkers, "run_job")
    def run_job(real: Wrapper, *args: Any) -> None:
        # It would be done by then.
        time.sleep(0.01)
        real(*args)

    AwaitedParameter.__torch_function__ = classmethod(read)  # type: ignore[assignment]


class _EverybodysTurn:
    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: Any) -> None:
        pass

    acquire = _is_owned = lambda self, *_, **__: True
    release = __exit__


def nobody_waits_for_a_turn() -> None:
    """Two threads may carry out one step."""

    @around(Failures, "__init__")
    def begin(real: Wrapper, failures: Any, *args: Any) -> None:
        real(failures, *args)
        failures.turn = _EverybodysTurn()


MUTATIONS: dict[str, Mutation] = {
    "kernel-done-twice": Mutation(kernel_done_twice),
    "chunk-recorded-first": Mutation(chunk_recorded_first),
    "slots-kept": Mutation(slots_kept),
    "flag-never-set": Mutation(flag_never_set),
    "decision-kept": Mutation(decision_kept),
    "job-dropped": Mutation(job_dropped),
    "worker-error-swallowed": Mutation(worker_error_swallowed),
    "step-counted-twice": Mutation(step_counted_twice),
    "lost-device-hides-the-rest": Mutation(lost_device_hides_the_rest, "shards:0:20"),
    "rates-of-the-next-batch": Mutation(rates_of_the_next_batch, "users:0:60"),
    "allocated-after-the-begin": Mutation(allocated_after_the_begin, "begun:0:12"),
    "few-signals-are-deferred": Mutation(few_signals_are_deferred, "calls-signals:0:70"),
    "writes-are-not-compared": Mutation(writes_are_not_compared, "writers:0:20"),
    "nobody-waits-to-read-a-weight": Mutation(nobody_waits_to_read_a_weight, "writers:55:90"),
    "nobody-waits-for-a-turn": Mutation(nobody_waits_for_a_turn, "readers:0:24"),
}
