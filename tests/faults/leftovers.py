# SPDX-License-Identifier: Apache-2.0
"""The leftovers of a process beyond a case: memory, threads, hooks on all modules, signal handlers, torch's modes.

`Leftovers.now()` before a case, `more_than` behind it: the objects that a closed optimizer or offloader has left name
themselves.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from reference_impl.memory.host import host_book

# A thread ends, and makes its last slab, a moment after its owner has been closed.
_MOST_S = 5.0
_ON_MODULES = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"),
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Leftovers:
    """Counts and settings of this process."""

    live_bytes: int
    reserved_bytes: int
    threads: int
    files: int
    hooks_on_all: int
    handlers: tuple[Any, ...]
    modes: dict[str, Any]

    @classmethod
    def now(cls) -> Leftovers:
        """Return those of this moment."""
        return cls(
            live_bytes=host_book.live_bytes,
            reserved_bytes=host_book.reserved_bytes,
            threads=threading.active_count(),
            files=len(os.listdir("/proc/self/fd")),
            hooks_on_all=len(modules._global_forward_pre_hooks) + len(modules._global_forward_hooks),
            # Numbers below 32: SIGKILL and SIGSTOP have none.
            handlers=tuple(signal.getsignal(number) for number in sorted(signal.valid_signals())),
            modes=_modes(),
        )

    def more_than(self) -> str:
        """Return the objects of now that were not there then; empty if there is nothing."""
        stop = time.monotonic() + _MOST_S
        while (found := self._found()) and time.monotonic() < stop:
            gc.collect()
            time.sleep(0.01)
        return found

    def _found(self) -> str:
        now = Leftovers.now()
        counts = {
            "live bytes of host memory": now.live_bytes - self.live_bytes,
            "reserved bytes of host memory": now.reserved_bytes - self.reserved_bytes,
            "threads": now.threads - self.threads,
            "open files": now.files - self.files,
            "hooks on every forward": now.hooks_on_all - self.hooks_on_all,
        }
        found = [f"{count} {what}" for what, count in counts.items() if count > 0]
        numbers = sorted(signal.valid_signals())
        changed = [n for n, a, b in zip(numbers, self.handlers, now.handlers, strict=True) if a != b]
        if changed:
            found.append(f"other handlers of the signals {[int(number) for number in changed]}")
        found += [f"{name} {mode}" for name, mode in now.modes.items() if mode != self.modes[name]]
        return ", ".join(found)


def _modes() -> dict[str, Any]:
    """Return which of torch's modes this thread is in."""
    return {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "__torch_function__ answers": torch._C._is_torch_function_enabled(),
        "modes of __torch_function__": torch._C._len_torch_function_stack(),
        "modes of __torch_dispatch__": torch._C._len_torch_dispatch_stack(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    }


def hooks_of(model: nn.Module) -> int:
    """Return how many hooks `model`, its modules and its parameters have."""
    on_modules = sum(len(getattr(each, name)) for each in model.modules() for name in _ON_MODULES)
    on_parameters = sum(
        len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())
        for param in model.parameters()
    )
    return on_modules + on_parameters
