# SPDX-License-Identifier: Apache-2.0
"""Observes a training process from inside: three moments of a step, and the owners of its bytes then.

The moments are the loss (`backward()` is called), the step (`optimizer.step()` begins) and the step's end. Torch's own
running peak is never reset here; it tells the phase, between two moments, of its rise. Counting takes at most 1 % of
the run's time. A fault of the observer ends the observation and never the program.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload_watch.owners import REST, Owners

_SHARE_OF_TIME = 0.01
_LEAST_S = 0.5  # between two counts
_SCAN_EVERY = 30  # counts
_FIRST_STEPS = 3  # states are made in the first, the second is the first with all of them


class Observer:
    """Writes each sample of this process to `path`, in place of the last one; `tell`, if given, gets it too."""

    def __init__(self, path: Path, tell: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._path, self._tell = path, tell
        self._owners = Owners()
        self._process = os.getpid()
        self._began_s = self._next_s = time.perf_counter()
        self._last_step_s: float | None = None
        self._counts = 0
        self._is_counting = False  # in this step
        self._is_over = False
        self._peak_bytes = 0
        self._foreign_bytes = 0  # the owners' peak of memory that no allocator here counts
        self._undo: list[Callable[[], None]] = []
        self._ledger: Any = None
        self.seen: dict[str, Any] = {"steps": 0, "step_s": None, "now": None, "peak": None, "problem": None}

    def start(self) -> None:
        """Begin: with hooks of all optimizers and of `backward()`, and a ledger without a GPU."""
        from torch.optim import optimizer as optimizers

        before = optimizers.register_optimizer_step_pre_hook(lambda each, *_: self._safely(self._step, each))
        after = optimizers.register_optimizer_step_post_hook(lambda each, *_: self._safely(self._stepped))
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._safely(self._loss)
            return backward(*args, **kwargs)

        torch.autograd.backward = watched

        def take_back() -> None:
            if torch.autograd.backward is watched:
                torch.autograd.backward = backward

        self._undo += [before.remove, after.remove, take_back]
        if not _has_gpu():
            self._safely(self._open_ledger)
        atexit.register(self._end)
        self._undo.append(lambda: atexit.unregister(self._end))

    def stop(self) -> None:
        """Leave the process as it was, and write the last sample."""
        self._end()
        while self._undo:
            self._undo.pop()()

    def _open_ledger(self) -> None:
        try:
            ledger = importlib.import_module("reference_impl.memory.ledger")
            device = importlib.import_module("reference_impl.device").Device.of("cpu")
        except Exception as error:
            self.seen["problem"] = f"no bytes of activations without a GPU: {type(error).__name__}: {error}"
            return
        self._ledger = ledger.Ledger(device)
        self._ledger.__enter__()
        self._undo.append(lambda: self._ledger.__exit__(None, None, None))

    def _safely(self, part: Callable[..., None], *args: Any) -> None:
        # A child that was forked has the hooks too, and training is the parent's.
        if self._is_over or os.getpid() != self._process or torch.compiler.is_compiling():
            return
        try:
            part(*args)
        except Exception as error:
            self._is_over = True
            self.seen["problem"] = f"{type(error).__name__}: {error}"

    def _loss(self) -> None:
        self._rise("forward")
        if self._is_due():
            self._count("loss")

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        self._rise("backward")
        if self._owners.steps(optimizer):
            self._counts = 0  # scan again: with an optimizer comes a model
        if self._is_due():
            self._count("step")

    def _is_due(self) -> bool:
        """Return whether this step is counted: the first ones, later ones by the clock or behind a new peak."""
        self._is_counting |= self.seen["steps"] < _FIRST_STEPS or time.perf_counter() >= self._next_s
        return self._is_counting

    def _stepped(self) -> None:
        self._rise("update")
        now_s = time.perf_counter()
        self.seen["steps"] += 1
        if self._last_step_s is not None:
            last_s, before_s = now_s - self._last_step_s, self.seen["step_s"]
            self.seen["step_s"] = last_s if before_s is None else 0.8 * before_s + 0.2 * last_s
        self._last_step_s = now_s
        if self._is_counting:
            self._is_counting = False
            self._count("after step")
            self._write()

    def _count(self, moment: str) -> None:
        """Count the bytes of each owner now, and put the next count off in proportion to this one's time."""
        began_s = time.perf_counter()
        if self._counts % _SCAN_EVERY == 0:
            self._owners.scan()
        self._counts += 1
        tiers = self._owners.count(cpu_is_device=self._ledger is not None)
        live_bytes = self._live_bytes()
        if live_bytes is not None:
            owned_bytes = sum(tiers.device.values())
            self._foreign_bytes = max(self._foreign_bytes, owned_bytes - live_bytes)
            live_bytes += self._foreign_bytes
            tiers.device[REST] = live_bytes - owned_bytes
            if self.seen["peak"]:
                self.seen["peak"]["bytes"] = self._peak_bytes + self._foreign_bytes
        self.seen.setdefault("moments", {})[moment] = tiers._asdict()
        self.seen["now"] = {**tiers._asdict(), "moment": moment, "device_bytes": live_bytes}
        took_s = time.perf_counter() - began_s
        self._next_s = max(self._next_s, time.perf_counter()) + max(took_s / _SHARE_OF_TIME / 3, _LEAST_S / 3)

    def _live_bytes(self) -> int | None:
        if torch.cuda.is_initialized():
            return int(torch.cuda.memory_allocated())
        return None if self._ledger is None else int(self._ledger.device_bytes)

    def _rise(self, phase: str) -> None:
        """Note in which phase the running peak has risen."""
        if torch.cuda.is_initialized():
            peak_bytes = torch.cuda.max_memory_allocated()
        elif self._ledger is not None:
            peak_bytes = self._ledger.peak_device_bytes
        else:
            return
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self._next_s = min(self._next_s, time.perf_counter())
            self.seen["peak"] = {
                "bytes": peak_bytes + self._foreign_bytes,
                "phase": phase,
                "step": self.seen["steps"],
            }

    def _end(self) -> None:
        if os.getpid() == self._process:
            self._safely(self._rise, "forward")
            self._write()

    def _write(self) -> None:
        self.seen |= {
            "process": self._process,
            "rank": os.environ.get("RANK") or os.environ.get("SLURM_PROCID"),
            "device": _device_name(),
            "host_peak_bytes": _most_resident_bytes(),
            "run_s": time.perf_counter() - self._began_s,
            "plan": self._owners.plan,
        }
        if self._tell is not None:
            self._tell(self.seen)
            return
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(self.seen), encoding="utf-8")
            new.replace(self._path)
        except (OSError, TypeError, ValueError):  # the watcher is gone, or the disk is full
            return


def _has_gpu() -> bool:
    """Return whether torch may find an accelerator, without waking a driver that a fork could not share."""
    built = torch.version.cuda or getattr(torch.version, "hip", None) or getattr(torch.version, "xpu", None)
    nodes = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
    return bool(built) and any(os.path.exists(node) for node in nodes)


def _device_name() -> str | None:
    if not torch.cuda.is_initialized():
        return None
    return f"{torch.cuda.get_device_name()} ({torch.cuda.current_device()})"


def _most_resident_bytes() -> int:
    """Return the peak of this process's host memory, mapped files included (`ru_maxrss`)."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def observe(folder: str) -> None:
    """Observe this process for `offload watch`, which reads the files of `folder`."""
    Observer(Path(folder) / f"{os.getpid()}.json").start()
