# SPDX-License-Identifier: Apache-2.0
"""Trials of `fit` in which one operation finds no memory."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl.fitting import trial


class Failing(TorchDispatchMode):
    """The n-th operation of a trial finds no memory."""

    def __init__(self, nth):
        super().__init__()
        self.nth, self.done, self.is_on = nth, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_on:
            self.done += 1
            if self.done == self.nth:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing_trials(nth, monkeypatch):
    """Let the n-th operation of the trials fail; the result's `done` counts them."""
    failing, run = Failing(nth), trial.run

    def watched(*args, **options):
        failing.is_on = True
        try:
            return run(*args, **options)
        finally:
            failing.is_on = False

    with monkeypatch.context() as patched, failing:
        patched.setattr(trial, "run", watched)
        yield failing
