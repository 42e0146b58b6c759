# SPDX-License-Identifier: Apache-2.0
"""Readers of weights that an update still writes: the forward of an attached model, and other threads.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.distributed.fsdp2 import missing_name
from reference_impl.memory.closing import do_undoably, undo_all
from reference_impl.optimizers import checks
from reference_impl.optimizers.forward_waits import ForwardWaits, Wait
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.writes.module_load import CheckLoad


class AttachedModel:
    """The model whose modules wait in forward for the weights of an optimizer; there is none unless one is attached."""

    def __init__(self) -> None:
        self._waits: ForwardWaits | None = None
        self._gathers_can_wait = True
        # Calls that take the hooks of the model off, and those of an attached one before that are left.
        self._undo: list[Callable[[], None]] = []

    def attach(
        self,
        model: nn.Module,
        members: Mapping[torch.Tensor, Member],
        *,
        device: Device,
        wait_for: Wait,
        refresh_masters: Wait,
        check_load: CheckLoad,
        noting_status: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Let `model` wait from now on, and no other; see `ForwardWaits`, whose errors this raises."""
        checks.check_model(model, serves_data_parallel=True)
        matrices = {param: m.matrices for param, m in members.items() if m.matrices is not None}
        checks.check_no_embeddings(model, matrices)
        missing = missing_name(model)
        if missing is not None:
            checks.warn_gathers_cannot_wait(missing)

        def hook() -> Callable[[], None]:
            self._waits = ForwardWaits(
                model,
                members,
                device=device,
                wait_for=wait_for,
                refresh_masters=refresh_masters,
                check_load=check_load,
                noting_status=noting_status,
                gates=missing is None,
            )
            self._gathers_can_wait = missing is None
            return self._waits.close

        before = [*self._undo]
        do_undoably(hook, self._undo)
        undo_all(before)
        # Only now: hooks of before that an interrupt leaves are taken off with those of now.
        del self._undo[:-1]

    def check_has(self, params: Iterable[torch.Tensor]) -> None:
        """Raise ValueError for one of `params` that the model does not have."""
        if self.model is not None:
            checks.check_in_model(self.model, params)

    def detach(self) -> None:
        """Take all hooks off."""
        undo_all(self._undo)
        self._waits = None

    def __bool__(self) -> bool:
        """Return whether a model was attached."""
        return self._waits is not None

    @property
    def model(self) -> nn.Module | None:
        """The model, where there is one."""
        return None if self._waits is None else self._waits.model

    @property
    def waits(self) -> bool:
        """Whether all reads of an attached model wait, so `step()` need not."""
        return self._waits is not None and self._gathers_can_wait

    @property
    def has_run_since_step(self) -> bool:
        """Whether its forward has begun since the last step, in the thread that steps."""
        return self._waits is not None and self._waits.has_run_since_step

    @property
    def has_compiled(self) -> bool:
        """Whether compiled code of it has read weights."""
        return self._waits is not None and self._waits.has_compiled

    def on_step(self, members: Iterable[Member]) -> None:
        """Note that a step with new gradients of `members` begins."""
        if self._waits is not None:
            self._waits.on_step(members)

    def order_gathers(self, *, all_are_new: bool) -> None:
        """Let FSDP2's gathers run behind all that the live current stream has waited for, see `ForwardWaits`."""
        if self._waits is not None:
            self._waits.order_gathers(all_are_new=all_are_new)


class StepSite:
    """Thread and stream of the last step; before the first one, the constructing thread.

    Another thread only reads weights, unless it is one of autograd's in a backward.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._thread = threading.get_ident()
        self.stream: Any = None

    def note_thread(self) -> None:
        """Note that the calling thread is about to step."""
        self._thread = threading.get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the calling thread is neither the one that steps nor one of autograd's in a backward."""
        return self._thread != threading.get_ident() and torch._C._current_graph_task_id() == -1

    def see(self, wait: Callable[[], None]) -> None:
        """Run `wait`: it makes the live current stream wait for weights, and nobody waits after it.

        So the stream of the steps waits, and a thread that reads on its own stream waits behind it.
        """
        stream = self.stream
        if stream is None or not self.is_elsewhere or self.device.current_stream() == stream:
            wait()
            return
        with self.device.on(stream):
            wait()
            weights_are_new = self.device.record()
        self.device.wait(weights_are_new)
