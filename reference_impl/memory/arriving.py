# SPDX-License-Identifier: Apache-2.0
"""Weights whose new values are on their way, for rooms that copy weights away without calling the model's modules.

A parameter on its way has a class that waits at every use, but not where compiled code reads it: that checks classes.
There compiled code waits itself, and what is read in front of it asks here. The optimizer announces its weights, and
whoever moves weights need not know the optimizer.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# By the id of each parameter.
_waits: dict[int, Callable[[torch.Tensor], object]] = {}


def expect(param: torch.Tensor, wait: Callable[[torch.Tensor], object]) -> None:
    """Let `wait(param)` wait for the new value of `param`, until it has arrived."""
    _waits[id(param)] = wait


def has_arrived(param: torch.Tensor) -> None:
    """Note that the value of `param` is new."""
    _waits.pop(id(param), None)


def wait_for(param: torch.Tensor) -> None:
    """Wait for the new value of `param`, if one is on its way."""
    wait = _waits.get(id(param))
    if wait is not None:
        wait(param)
