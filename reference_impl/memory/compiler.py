# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile must not trace into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

_call_uncompiled: Callable[..., Any] | None = None


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return `function` such that torch.compile, in whose code it may be called, traces neither it nor its callees.

    A compiler that nobody has imported is not running. It is not imported here, because the import takes seconds.
    """
    global _call_uncompiled
    if "torch._dynamo" not in sys.modules:
        return function
    if _call_uncompiled is None:
        _call_uncompiled = torch.compiler.disable(lambda function, *args: function(*args))
    return functools.partial(_call_uncompiled, function)
