# SPDX-License-Identifier: Apache-2.0
"""The blocks on the device: the ones in use, and the ones needed next.

Whenever a block begins or ends, the window becomes the next few distinct blocks of the learnt order. This rule alone
keeps the last blocks at the turn from forward to backward and the first ones from step to step, and it starts the
next copy as soon as a block's memory is free.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from reference_impl.weights.order import Kind, VisitOrder
from reference_impl.weights.visiting import VisitingBlock

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def _alone(method: Callable[Concatenate[Window, _P], _Result]) -> Callable[Concatenate[Window, _P], _Result]:
    """Let one thread at a time change a window: an optimizer brings blocks while another thread's forward uses them."""

    @wraps(method)
    def call(window: Window, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        with window._lock:
            return method(window, *args, **named)

    return call


class Window:
    """Holds `capacity` of `blocks` at a time; more only while more are in use at once.

    `lingering` of the places are for used blocks: the next blocks do not get them.
    """

    def __init__(self, blocks: Sequence[VisitingBlock], capacity: int, *, lingering: int = 0) -> None:
        self.capacity = capacity
        self._lingering = lingering
        self._lock = threading.RLock()
        self.loads = 0
        self.loaded_bytes = 0
        self.late_loads = 0
        self._blocks = blocks
        self._order = VisitOrder(len(blocks))
        self._in_forward: VisitingBlock | None = None
        self._in_backward: VisitingBlock | None = None
        self._graph_task = -1
        # The running backwards, one inside another, and the blocks open for use.
        self._backwards: set[int] = set()
        self._open: list[VisitingBlock] = []
        self.advance()

    @_alone
    def before_forward(self, block: VisitingBlock) -> None:
        """Have `block` on the device for the kernels that follow."""
        # Inside the same backward this is a recomputation, and the block that asked for it goes on afterwards.
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._in_backward = None
        if task == -1:
            # A failed backward has not told its end.
            self._backwards.clear()
        if not block.is_streamed:
            return
        self._in_forward = block
        self._visit(Kind.FORWARD if torch.is_grad_enabled() else Kind.EVALUATE, block)

    @_alone
    def after_forward(self, block: VisitingBlock) -> None:
        """Let `block` go, unless it is needed again soon. Shards go once their gather has read them."""
        self._in_forward = None
        self.advance()
        self._rest()

    def begins_backward(self, block: VisitingBlock) -> bool:
        """Whether `before_backward(block)` would begin a backward of `block`, and not go on with it."""
        task = torch._C._current_graph_task_id()
        return block.is_streamed and not (self._in_backward is block and self._graph_task == task)

    @_alone
    def before_backward(self, block: VisitingBlock) -> None:
        """Have `block` on the device; the block before it in this backward is done.

        Autograd runs nodes in the reverse order of their making, so all of a later block's have run by now. Raises
        RuntimeError for a backward to be differentiated itself: its backward would go through no output of the block.
        """
        if not self.begins_backward(block):
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True has reached a block whose weights stream; expected "
                "create_graph=False, because a second backward would not bring the weights; try "
                "`with streamer.gathered():` around both"
            )
        self._in_backward, self._graph_task = block, torch._C._current_graph_task_id()
        if self._graph_task not in self._backwards:
            self._backwards.add(self._graph_task)
            end = partial(self._end_backward, self._graph_task)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._visit(Kind.BACKWARD, block)

    @_alone
    def before_gather(self, block: VisitingBlock, kind: Kind) -> None:
        """Have `block` on the device for the next gather on the live current stream.

        Earlier gathers are in their streams already.
        """
        self._in_forward = block
        self._visit(kind, block)

    @_alone
    def release_at_turn(self) -> None:
        """Free all that may go if backward needs blocks again; its first visit brings the blocks that it needs."""
        if self._order.turns:
            self._in_forward = None
            for block in self.loaded:
                if not block.is_being_written:
                    block.evict()

    @_alone
    def forget(self, block: VisitingBlock) -> None:
        """Note that the weights of `block` do not stream for now."""
        if block is self._in_backward:
            self._in_backward = None

    @_alone
    def advance(self) -> None:
        """Free blocks without a near use, and start loading the next ones."""
        self._hold(self._wanted())

    @_alone
    def bring(self, block: VisitingBlock) -> None:
        """Have `block` on the device or on its way, in the place of the block needed last."""
        if not block.is_loaded:
            self._hold(list(dict.fromkeys([*self._in_use, block])))

    @_alone
    def reload(self) -> None:
        """Bring the blocks on the device again: the host's copies have been written."""
        for block in self.loaded:
            block.evict()
        self.advance()

    @property
    def loaded(self) -> list[VisitingBlock]:
        """The blocks on the device or on their way."""
        return [block for block in self._blocks if block.is_loaded]

    @property
    def coming(self) -> list[VisitingBlock]:
        """The `loaded` blocks needed next, in the order of their need."""
        upcoming = [self._blocks[index] for index in dict.fromkeys(self._order.upcoming())]
        return [block for block in upcoming[: self.capacity] if block.is_loaded]

    def _hold(self, wanted: list[VisitingBlock]) -> None:
        """Have `wanted` on the device, and as many others as fit, the first needed first."""
        loaded = self.loaded
        missing = [block for block in wanted if not block.is_loaded]
        excess = len(loaded) + len(missing) - max(self.capacity, len(wanted))
        if excess > 0:
            for block in self._needed_last(loaded, excess, beside=wanted):
                block.evict()
        for block in missing:
            block.load()
            self.loads += 1
            self.loaded_bytes += block.copied_bytes

    def _needed_last(
        self, loaded: list[VisitingBlock], count: int, *, beside: list[VisitingBlock]
    ) -> list[VisitingBlock]:
        """Return up to `count` blocks to free: unneeded ones first, then the ones needed last."""
        stale = [block for block in loaded if block not in beside and not block.is_being_written]
        if len(stale) <= count:
            return stale
        stale.sort(key=lambda block: self._order.visits_until(block.index), reverse=True)
        return stale[:count]

    @property
    def _in_use(self) -> list[VisitingBlock]:
        return list(
            dict.fromkeys(block for block in (self._in_forward, self._in_backward) if block is not None)
        )

    def _wanted(self) -> list[VisitingBlock]:
        """Return the blocks in use, then the next ones that fit beside them."""
        wanted = self._in_use
        for index in self._order.upcoming():
            if len(wanted) >= self.capacity - self._lingering:
                break
            block = self._blocks[index]
            if block.is_streamed and block not in wanted:
                wanted.append(block)
        return wanted

    def _visit(self, kind: Kind, block: VisitingBlock) -> None:
        self._order.visit(kind, block.index)
        self.late_loads += not block.is_loaded
        self.advance()
        self._rest()
        block.wait()
        self._open.append(block)

    def _end_backward(self, task: int) -> None:
        self._backwards.discard(task)
        # An inner backward leaves its block to the outer one.
        if not self._backwards:
            self._rest(of_all=True)

    def _rest(self, *, of_all: bool = False) -> None:
        """Have blocks that are not in use, or all, refuse all uses but their own forward and backward."""
        in_use = [] if of_all else self._in_use
        for block in self._open:
            if block not in in_use:
                block.rest()
        self._open = in_use
