# SPDX-License-Identifier: Apache-2.0
"""Fails one kernel, copy, allocation, event, worker task, thread's start or user hook, at its n-th call.

A *seam* is a place at which a call may fail before it has an effect. `SEAMS` names where each is in the package; it is
the only place here that knows private names. A *visit* is one call through a seam. A dry run counts the visits of every
moment (step and phase), so that a `Fault` can name one that will be reached.

Visits of the main thread are counted by moment. Those of other threads are counted over the whole run, because which
moment they share with the main thread is chance.

Once a step has begun nothing is allocated (`step.as_one`). So a fault there, other than an allocation's, is that of a
queued kernel or copy, or Python itself: the step is lost, and the optimizer has to say so.
"""

from __future__ import annotations

import errno
import functools
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import begun_steps
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.device import Device
from reference_impl.memory.host import HostMemoryError


class UserError(Exception):
    """The error of a user's own hook or closure."""


def out_of_memory() -> BaseException:
    """Return torch's error when the device's allocator has nothing left."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB (injected)")


def host_out_of_memory() -> BaseException:
    return HostMemoryError(needed_bytes=2**31, available_bytes=2**30, remedy="injected")


def device_lost() -> BaseException:
    """Return torch's error about a fault of CUDA that is no lack of memory; nothing works after it."""
    return RuntimeError("CUDA error: an illegal memory access was encountered (injected)")


# The faults at a seam. `device_lost` makes every later visit of the device fail with the same error.
KINDS: dict[str, Callable[[], BaseException]] = {
    "out_of_memory": out_of_memory,
    "memory_error": lambda: MemoryError("injected"),
    "host_memory_error": host_out_of_memory,
    "worker_error": lambda: RuntimeError("injected into a worker"),
    "disk_error": lambda: OSError(errno.EIO, "Input/output error (injected)"),
    "no_thread": lambda: RuntimeError("can't start new thread (injected)"),
    "device_lost": device_lost,
    "user_error": lambda: UserError("injected into a user's hook"),
}


class Seam(NamedTuple):
    """Methods of one kind: the first of `places` (module, class, method) that exist, and the faults there."""

    places: tuple[tuple[str, str | None, str], ...]
    kinds: tuple[str, ...]


_OPTIMIZERS = "reference_impl.optimizers"
_HOST_KINDS = ("memory_error", "host_memory_error")

# Places beyond those of `Device`. Several places of one seam are all patched; one must exist.
SEAMS: dict[str, Seam] = {
    "kernel": Seam(
        (
            (f"{_OPTIMIZERS}.algorithms", "Adam", "update"),
            (f"{_OPTIMIZERS}.algorithms", "SGD", "update"),
            (f"{_OPTIMIZERS}.streamed.packing", "RoundedUpdate", "update"),
        ),
        ("out_of_memory", "device_lost"),
    ),
    "cpu_kernel": Seam(
        ((f"{_OPTIMIZERS}.cpu.update", "CpuKernel", "update"),), ("memory_error", "worker_error")
    ),
    "allocate": Seam(
        (("reference_impl.memory.arena", "HostArena", "allocate"),), ("memory_error", "host_memory_error")
    ),
    "slab": Seam(
        (("reference_impl.memory.slab", "Slab", "__init__"),), ("memory_error", "host_memory_error")
    ),
    "disk": Seam((("os", None, "pwrite"), ("os", None, "preadv")), ("disk_error",)),
    "spill": Seam(
        tuple(
            ("reference_impl.memory.spill_file", "SpillFile", name) for name in ("write", "read", "allocate")
        ),
        ("memory_error",),
    ),
    "submit": Seam(((f"{_OPTIMIZERS}.cpu.workers", "DeadlineWorkers", "submit"),), ("memory_error",)),
    # As where a container's limit of processes is reached.
    "thread": Seam((("threading", "Thread", "start"),), ("no_thread",)),
}

# Methods of `Device`, by seam.
DEVICE_SEAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "copy": (("copy", "copy_in", "copy_out"), ("out_of_memory", "device_lost")),
    "event": (("record",), ("out_of_memory", "device_lost")),
    "order": (
        (
            "wait",
            "on_d2h",
            "on_d2h_for_threads",
            "on_h2d",
            "on_h2d_of_weights",
            "on_update_stream",
            "synchronize",
        ),
        ("device_lost",),
    ),
}
OTHER_KINDS: dict[str, tuple[str, ...]] = {
    # Every operator of torch on the main thread: allocations and kernels of the model, of autograd and of ours.
    "operator": ("out_of_memory",),
    # The entry of a worker's task.
    "task": ("memory_error", "worker_error"),
    "hook": ("user_error",),
}
_ON_DEVICE = frozenset({"kernel", *DEVICE_SEAMS})
_ALLOCATING = frozenset({"allocate", "slab"})
# A worker that has died inside an update cannot be resumed, whatever killed it.
WORKER = "@worker"


def kinds_of(seam: str) -> tuple[str, ...]:
    """Return the names of the faults at `seam`."""
    base = seam.removesuffix(WORKER)
    if base in SEAMS:
        return SEAMS[base].kinds
    return DEVICE_SEAMS[base][1] if base in DEVICE_SEAMS else OTHER_KINDS[base]


def some_kind(random: Random, seam: str) -> str:
    """Choose one of them; a lost device seldom, since there is little to see after it."""
    possible = kinds_of(seam)
    return random.choices(possible, [0.3 if each == "device_lost" else 1.0 for each in possible])[0]


class Moment(NamedTuple):
    """One kind of visits in one phase of one step; (-1, "") for those of other threads."""

    step: int
    phase: str
    seam: str


@dataclass(frozen=True)
class Fault:
    """The `nth` visit (from 1) of `moment` raises the error of `kind`."""

    moment: Moment
    nth: int
    kind: str

    def __str__(self) -> str:
        moment = self.moment
        when = "another thread" if moment.step < 0 else f"step {moment.step}, {moment.phase}"
        return f"{self.kind} at {moment.seam} {self.nth} ({when})"

    @property
    def may_break(self) -> bool:
        """Whether an optimizer may give up after this, if it says so."""
        return self.kind == "device_lost" or self.moment.seam.endswith(WORKER)


@dataclass(frozen=True)
class OnceBegun:
    """Whatever allocates on the training thread once a step has begun finds no memory: nothing is to."""

    may_break = False

    def __str__(self) -> str:
        return "no memory once a step has begun"


class Undisturbed:
    """While `active`, no call of any thread counts or fails: others are compared with this run."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Be active inside."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


undisturbed = Undisturbed()


class Injector:
    """Counts visits, and fails one if given a `fault`. One at a time may be installed."""

    def __init__(self, fault: Fault | OnceBegun | None = None) -> None:
        self.fault = fault if isinstance(fault, Fault) else None
        self._once_begun = isinstance(fault, OnceBegun)
        self.visits: Counter[Moment] = Counter()
        self.error: BaseException | None = None
        # Whether it came where a begun step is carried out, and was no lack of memory for an allocation.
        self.lost_a_step = False
        self.step, self.phase = -1, "build"
        self._lock = threading.Lock()
        self._quiet = False

    def enter(self, step: int, phase: str) -> None:
        """Say which moment begins."""
        self.step, self.phase = step, phase

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Neither count nor fail the main thread's calls inside, unless the device is lost."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @property
    def may_break(self) -> bool:
        """Whether an optimizer may give up after the fault, if it says so."""
        return self.lost_a_step or (self.fault is not None and self.fault.may_break)

    def fail(self, error: BaseException, *, allocates: bool = False) -> None:
        """Raise the `error` of the fault."""
        self.error = error
        self.lost_a_step = begun_steps.carries_out() and (begun_steps.may_allocate() or not allocates)
        raise error

    def visit(self, seam: str, *, allocates: bool = False) -> None:
        """Note a call through `seam`, which `allocates` or does not; raises when it is to fail."""
        if undisturbed.active:
            return
        # Autograd's own threads are the training's too.
        thread = threading.current_thread()
        on_main = thread is threading.main_thread() or thread.name.startswith("Dummy-")
        if self.fault is not None and self.fault.kind == "device_lost" and self.error and seam in _ON_DEVICE:
            raise self.error
        if on_main and self._quiet:
            return
        allocates = allocates or seam in _ALLOCATING
        if self._once_begun and allocates and not begun_steps.may_allocate():
            self.fail(KINDS["out_of_memory"](), allocates=True)
        moment = Moment(self.step, self.phase, seam) if on_main else Moment(-1, "", seam + WORKER)
        with self._lock:
            self.visits[moment] += 1
            fails = (
                self.fault is not None
                and self.error is None
                and self.fault.moment == moment
                and self.fault.nth == self.visits[moment]
            )
        if fails:
            assert self.fault is not None
            self.fail(KINDS[self.fault.kind](), allocates=allocates)

    def names(self, error: BaseException) -> bool:
        """Return whether `error` is the injected one, or says that it came from it."""
        if isinstance(self.error, KeyboardInterrupt):
            return isinstance(error, KeyboardInterrupt)
        seen: BaseException | None = error
        while seen is not None:
            if seen is self.error or (self.error is not None and str(self.error) in str(seen)):
                return True
            if isinstance(self.error, RecursionError) and isinstance(seen, RecursionError):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

    @contextmanager
    def installed(self, device: Device) -> Iterator[Injector]:
        """Patch all seams, of `device`'s class too."""
        with ExitStack() as stack:
            stack.enter_context(begun_steps.watched())
            for seam, (places, _) in SEAMS.items():
                owners = [(_owner(module, name), method) for module, name, method in places]
                found = [
                    (owner, method)
                    for owner, method in owners
                    if owner is not None and hasattr(owner, method)
                ]
                if not found:
                    raise LookupError(
                        f"seam {seam!r} is at none of {places}; expected one; try mending SEAMS"
                    )
                for owner, method in found:
                    stack.enter_context(self._patched(owner, method, seam))
            for seam, (methods, _) in DEVICE_SEAMS.items():
                for method in methods:
                    stack.enter_context(self._patched(type(device), method, seam))
            stack.enter_context(self._tasks())
            if self.fault is None or self.fault.moment.seam.startswith("operator"):
                stack.enter_context(_Operators(self))
            yield self

    @contextmanager
    def _patched(self, owner: Any, name: str, seam: str) -> Iterator[None]:
        own = owner.__dict__.get(name)
        real = getattr(owner, name)

        @functools.wraps(real)
        def visited(*args: Any, **options: Any) -> Any:
            self.visit(seam)
            return real(*args, **options)

        setattr(owner, name, visited)
        try:
            yield
        finally:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    @contextmanager
    def _tasks(self) -> Iterator[None]:
        """Wrap the `run` of every job that is submitted to the workers."""
        workers = importlib.import_module(f"{_OPTIMIZERS}.cpu.workers").DeadlineWorkers
        real = workers.submit

        def submit(owner: Any, jobs: Any) -> Any:
            return real(owner, [replace(job, run=self._visited_task(job.run)) for job in jobs])

        workers.submit = submit
        try:
            yield
        finally:
            workers.submit = real

    def _visited_task(self, run: Callable[[], None]) -> Callable[[], None]:
        def visited() -> None:
            self.visit("task")
            run()

        return visited


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # It would wrap each call below, for the sake of `torch.compile`, which nobody uses here.
        return False

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self._injector = injector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Optimizers name their steps to the profiler, which cannot run out of memory.
        if func.namespace != "profiler":
            self._injector.visit("operator", allocates=begun_steps.allocates(func))
        return func(*args, **(kwargs or {}))


def _owner(module: str, name: str | None) -> Any:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    return found if name is None else getattr(found, name, None)
