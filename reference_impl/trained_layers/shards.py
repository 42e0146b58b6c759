# SPDX-License-Identifier: Apache-2.0
"""Shards that are kept on the host and visit the device for FSDP2's gathers, and for their updates.

The shards of one gather are a `ShardBlock`: one home on the host, and during a visit one slot of device memory. A
window brings the next block while FSDP2 gathers this one, in forward and in backward, in the order of the last step. A
gather gets its input inside the gather itself, on its stream. So it finds the right memory however it starts: by a
forward, backward, a prefetch, recomputation, or `unshard()`.

Forward has one slot more than backward, for the block that is updated while the next one comes. Between forward and
backward there is none: the loss often takes the most memory of a step.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from reference_impl.device import Device, Event, together
from reference_impl.distributed.fsdp2 import Read, Shard
from reference_impl.distributed.mesh import local_of, shard_like
from reference_impl.memory.absent import mark_absent, mark_present
from reference_impl.memory.closing import past_a_lost_device, undo_all
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.memory.ledger import resize_storage
from reference_impl.memory.slots import Slot, Slots
from reference_impl.memory.weight_home import refuse_update
from reference_impl.weights.hooks import Load
from reference_impl.weights.order import Kind
from reference_impl.weights.storages import BlockStorage, bytes_of, layout
from reference_impl.weights.trained import Home, Homes
from reference_impl.weights.visiting import VisitingBlock
from reference_impl.weights.window import Window

_ON_HOST = (
    "expected its use inside the forward or backward of its module, for which it is gathered; try model.state_dict(), "
    "whose shards are on the host, or `with streamer.gathered():` around this"
)

# Finishes begun updates of some parameters; also passed are the next parameters in order.
FinishUpdate = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class ShardBlock(VisitingBlock):
    """The `shards` of one gather, side by side in one of the `slots` during a visit.

    `make_idle` sees to an idle one.
    """

    is_streamed = True

    def __init__(
        self,
        device: Device,
        homes: Homes,
        slots: Slots,
        make_idle: Callable[[], None],
        shards: Sequence[Shard],
        index: int,
    ) -> None:
        """Copy `shards` home; their parameters stay as they are. Raises HostMemoryError."""
        super().__init__(device, index)
        self.shards = shards
        self.trained: list[torch.Tensor] = [shard.param for shard in shards if shard.param.requires_grad]
        self._homes = homes
        self._slots, self._make_idle = slots, make_idle
        self._sizes = [shard.memory.nbytes for shard in shards]
        self._offsets, self.size_bytes = layout(storages_of(shards))
        homes.keep(index, [bytes_of(shard.memory) for shard in shards], self._offsets, self.size_bytes)
        # The shards whose parameters are ordinary device tensors: none once attached, but for `StreamedShards.lent`.
        self.lent = set(range(len(shards)))
        self._slot: Slot | None = None
        # The streams of gathers that have read the shards since they came.
        self._read_on: list[object] = []

    def load(self) -> None:
        """Start the H2D copy into a slot, behind its last use and the last copy home."""
        self._device.refuse_capture("shard streaming")
        self._make_idle()

        def copy(slot: Slot) -> Event:
            arrived = self._device.copy_in(
                slot.bytes[: self.size_bytes],
                self._homes.bytes_of(self.index),
                after=(slot.free, self._stored),
            )
            self._slot, self._memory, self._started = slot, slot.bytes, lambda: arrived
            return arrived

        self._slots.fill(self, copy)

    @property
    def is_loaded(self) -> bool:
        """Whether it is on the device or on its way: it holds its slot."""
        return self._slot is not None and self._slot.holder is self

    def wait(self) -> None:
        """Make the live current stream wait until the shards are on the device."""
        self._device.wait(self._started())

    def rest(self) -> None:
        """Do nothing: the parameters always refuse uses, and gathers read the slot."""

    def withhold(self, offset: int) -> None:
        """Do nothing, for the same reason."""

    def evict(self) -> None:
        """Give the slot back, behind the gathers that read it and the copies in and home."""
        assert self._slot is not None
        read = []
        for stream in self._read_on:
            with self._device.on(stream):
                read.append(self._device.record())
        last = together(*read, self._started(), self._stored, self._brought)
        self._slots.give_back(self._slot, after=last)
        self._slot, self._memory, self._read_on = None, None, []

    def gather(self, index: int) -> torch.Tensor:
        """Return shard `index`, padded and flat, to a gather on the live current stream."""
        self.wait()
        stream = self._device.current_stream()
        if stream not in self._read_on:
            self._read_on.append(stream)
        return self.at(self._offsets[index], self._sizes[index]).view(self.shards[index].memory.dtype)

    def home_of(self, index: int, visit: Callable[[], Event]) -> Home:
        """Return the home of the parameter of shard `index`."""
        return Home(self._homes, self, self._offsets[index], self.shards[index].local, visit)

    def leave(self, index: int, *, read: Read, after: Callable[[], None], name: str) -> None:
        """Free the memory of shard `index`; its home has all bytes.

        A gather calls `read`, and then `after`; any other use is an error.

        One element stays: FSDP2 would take a parameter without memory for a replaced one.
        """
        shard = self.shards[index]
        with deferred_interrupts():
            # First: after any error below, `close` brings the shard back from its home.
            self.lent.discard(index)
            shard.serve(read, after)
            resize_storage(shard.memory.untyped_storage(), min(shard.memory.itemsize, self._sizes[index]))
            for tensor in (shard.local, shard.param):
                mark_absent(tensor, name, _ON_HOST)

    def lend(self, index: int) -> None:
        """Make the parameter of shard `index` an ordinary device tensor, with its home's elements; the host waits."""
        shard = self.shards[index]
        self.wait_stored()
        resize_storage(shard.memory.untyped_storage(), self._sizes[index])
        shard.memory.copy_(self._at_home(index))
        with deferred_interrupts():
            shard.stop_serving()
            mark_present(shard.local)
            mark_present(shard.param)
            self.lent.add(index)

    def renew(self, index: int) -> bool:
        """Copy the lent shard `index` to its home; return whether it has changed."""
        home, now = self._at_home(index), self.shards[index].memory.cpu()
        if torch.equal(home, now):
            return False
        home.copy_(now)
        return True

    def _at_home(self, index: int) -> torch.Tensor:
        whole, offset = self._homes.bytes_of(self.index), self._offsets[index]
        return whole[offset : offset + self._sizes[index]].view(self.shards[index].memory.dtype)


class StreamedShards:
    """All blocks of a model, at most `prefetch` of them on the device in backward, one more in forward.

    The optimizer sees the homes of its parameters, and the parameters on the device or on their way (`ahead`). `names`
    has each parameter's name. A gather runs inside `noting_status_on_error`, so that the optimizer hears of a lost
    device. Raises HostMemoryError. It changes nothing of the model until it is attached.
    """

    def __init__(
        self,
        device: Device,
        homes: Homes,
        shards: Sequence[Sequence[Shard]],
        names: Mapping[torch.Tensor, str],
        *,
        finish_update: FinishUpdate,
        noting_status_on_error: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._homes = homes
        self._finish_update = finish_update
        self._noting_status_on_error = noting_status_on_error
        self._names = names
        self._device = device
        # Slots belong to the compute stream, wherever they are taken: its later tensors may have the same memory.
        self._stream = device.current_stream()
        self._kind = Kind.FORWARD
        self._is_stale = False
        self._slots = Slots(device)
        slot_bytes = max(layout(storages_of(each))[1] for each in shards)
        self._slots.allocate(slot_bytes, permanent=0, most=len(shards))
        self._blocks = [
            ShardBlock(device, homes, self._slots, self._make_idle, each, index)
            for index, each in enumerate(shards)
        ]
        self._places: dict[torch.Tensor, tuple[ShardBlock, int]] = {
            shard.param: (block, index) for block in self._blocks for index, shard in enumerate(block.shards)
        }
        self.home_of: dict[torch.Tensor, Home] = {
            param: block.home_of(index, partial(self._visit, block))
            for param, (block, index) in self._places.items()
        }
        self._held: set[torch.Tensor] = set()
        self._is_closed = False
        # One for each module with such parameters.
        self.loads: list[Load] = []

    def attach(self, *, prefetch: int) -> None:
        """Let all shards leave the device, and bring the first. After an error `close` leaves the model as it was."""
        self._leave(self._places)
        self._prefetch = prefetch
        self.window = Window(self._blocks, prefetch + 1)

    def __contains__(self, param: torch.Tensor) -> bool:
        """Return whether the shard of `param` streams, lent or not."""
        return param in self._places

    @property
    def ahead(self) -> list[torch.Tensor]:
        """The trained parameters that are on the device or on their way for the next gathers."""
        coming = {block.index for block in self.window.coming}
        return [param for block in self._blocks if block.index in coming for param in block.trained]

    def begin_forward(self, *, trains: bool) -> None:
        """Note that a forward begins, with a backward to follow if it `trains`.

        Raises RuntimeError for a parameter that has been replaced or moved.
        """
        self.end_failed_loads()
        self._kind = Kind.FORWARD if trains else Kind.EVALUATE
        self._stream = self._device.current_stream()
        for block in self._blocks:
            for shard in block.shards:
                if not shard.is_ours:
                    raise RuntimeError(
                        f"{self._names[shard.param]} has been replaced or moved while its shards stream; expected it "
                        "to stay; try load_state_dict without assign=True, and dtype or device before the streamer is "
                        "made"
                    )
        with self._noting_status_on_error():
            self.window.capacity = self._prefetch + 1
            self.window.advance()

    def end_forward(self) -> None:
        """Free the slots of a forward whose backward follows."""
        with self._noting_status_on_error():
            self.window.release_at_turn()
            with self._device.on(self._stream):
                self._slots.free()

    def reload(self) -> None:
        """Bring the shards on the device again before their next use: their homes have been written."""
        self._is_stale = True

    def end_failed_loads(self) -> None:
        """See `VisitingWeights`."""
        for load in self.loads:
            load.end_failed()

    def on_host(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's new weight as a shard on the host: the same memory, in a storage of its own.

        Of a lent parameter this is the parameter itself.
        """
        if self._is_lent(param):
            return param.detach()
        self._finish_update_at_home([param])
        local = self.home_of[param].host
        # numpy has no strides for empty tensors.
        own = torch.from_numpy(local.view(torch.uint8).numpy()).view(local.dtype) if local.numel() else local
        return shard_like(param, own.view(local_of(param).shape))

    def beside(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return all parameters that are gathered together with one of `params`."""
        blocks = dict.fromkeys(self._places[param][0] for param in params)
        return [shard.param for block in blocks for shard in block.shards]

    @contextmanager
    def lent(
        self, params: Iterable[torch.Tensor], *, refresh: Callable[[list[torch.Tensor]], None]
    ) -> Iterator[None]:
        """Have `params` as ordinary device tensors inside, once their updates are done; then `refresh` written ones.

        Where an error or a signal leaves some lent, entering again takes them back.
        """
        ours = [param for param in params if param not in self._held]
        try:
            self._held.update(ours)
            away = [param for param in ours if not self._is_lent(param)]
            self._finish_update_at_home(away)
            self._lend(away)
            yield
        finally:
            try:
                if written := self._take_back(ours):
                    refresh(written)
            finally:
                self._held.difference_update(ours)

    def _take_back(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Let lent `params` leave the device again, unless this was closed; return the written ones."""
        if self._is_closed:
            return []
        listed = [param for param in params if self._is_lent(param)]
        written = [param for param in listed if self._renew(param)]
        self._leave(listed)
        if written:
            self.reload()
        return written

    def close(self) -> None:
        """Give every shard device memory of its own again, and the host memory back; nothing updates them any more."""
        self._is_closed = True
        with past_a_lost_device():
            undo_all([partial(self._lend, [param]) for param in self._places if not self._is_lent(param)])
        with past_a_lost_device():
            self._homes.close()

    def _lend(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            block, index = self._places[param]
            block.lend(index)

    def _is_lent(self, param: torch.Tensor) -> bool:
        block, index = self._places[param]
        return index in block.lent

    def _renew(self, param: torch.Tensor) -> bool:
        block, index = self._places[param]
        return block.renew(index)

    def _leave(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            block, index = self._places[param]
            block.leave(
                index,
                read=partial(self._gather, block, index),
                after=partial(self._after_gather, block),
                name=self._names[param],
            )

    def _finish_update_at_home(self, params: Iterable[torch.Tensor]) -> None:
        """Block until the weights of `params` are new at home."""
        blocks = dict.fromkeys(self._places[param][0] for param in params)
        for block in blocks:
            self._finish_update(block.trained, [])
        for block in blocks:
            block.wait_stored()

    def _reload_stale(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self.window.reload()

    def _make_idle(self) -> None:
        """Have an idle slot, one more where all are held."""
        if self._slots.first_idle is None:
            with self._device.on(self._stream):
                self._slots.add_extra(None)

    def _visit(self, block: ShardBlock) -> Event:
        if block.lent:
            raise refuse_update(block.index)
        self._reload_stale()
        self.window.bring(block)
        return block.hold()

    def _gather(self, block: ShardBlock, index: int) -> torch.Tensor:
        """Return a shard to a gather; the first shard tells the window that its block is needed."""
        with self._noting_status_on_error():
            if index == 0:
                self._reload_stale()
                in_backward = torch._C._current_graph_task_id() != -1
                self.window.capacity = self._prefetch + (not in_backward)
                self.window.before_gather(block, Kind.BACKWARD if in_backward else self._kind)
                self._finish_update(block.trained, self.ahead)
            return block.gather(index)

    def _after_gather(self, block: ShardBlock) -> None:
        """Let the next block have the memory of `block`: its gather has read it."""
        with self._noting_status_on_error():
            self.window.after_forward(block)


def storages_of(shards: Iterable[Shard]) -> list[BlockStorage]:
    """Return the memory of `shards`, as other blocks describe theirs."""
    return [BlockStorage(("",), (shard.memory,)) for shard in shards]
