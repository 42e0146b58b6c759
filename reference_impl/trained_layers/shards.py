"""Shards that are kept on the host and visit the device for FSDP2's gathers, and for their updates.

The shards that one gather reads are a `ShardBlock`: one home on the host, and while they visit one slot of device
memory. A window brings the next block while FSDP2 gathers this one, in forward and in backward, in the order that it
has learnt from the last step. What a gather reads is handed over inside the gather itself, on its stream, so whatever
starts it (a forward, backward, a prefetch, recomputation, `unshard()`) finds the right memory.

Explained in docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import REACHED, Device, Event
from reference_impl.distributed.fsdp2 import Shard
from reference_impl.distributed.mesh import shard_like
from reference_impl.memory.interrupts import deferred_interrupts
from reference_impl.weights.order import Kind
from reference_impl.weights.storages import BlockStorage, bytes_of, layout
from reference_impl.weights.trained import Home, Homes
from reference_impl.weights.window import Window

# Makes the weights of parameters new, as far as an update of them has begun; others that come next are passed too.
Settle = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class DeviceSlot:
    """Device memory for one block; it may be written once all of `free` are reached."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self.bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)
        # Behind whatever used this memory before.
        self.free: tuple[Event, ...] = (device.record(),)


class DeviceSlots:
    """Slots that blocks take and give back; one more is allocated where all are taken, for good."""

    def __init__(self, device: Device, slot_bytes: int) -> None:
        self._device = device
        self._slot_bytes = slot_bytes
        self._idle: list[DeviceSlot] = []

    def take(self) -> DeviceSlot:
        """Return an idle slot, or a new one."""
        return self._idle.pop(0) if self._idle else DeviceSlot(self._device, self._slot_bytes)

    def give_back(self, slot: DeviceSlot, *, after: Iterable[Event]) -> None:
        """Let the next block have `slot` once all of `after` are reached."""
        slot.free = tuple(after)
        self._idle.append(slot)


class ShardBlock:
    """The shards that one gather reads: those of `shards`, side by side.

    It is what a `Window` holds (`load`, `evict`, `wait`), and what an optimizer updates (`at`, `hold`, `stored`).
    """

    is_streamed = True

    def __init__(
        self, device: Device, homes: Homes, slots: DeviceSlots, shards: Sequence[Shard], index: int
    ) -> None:
        """Copy `shards` home; their parameters stay as they are. Raises HostMemoryError."""
        self.shards = shards
        self.index = index
        self.is_held = False
        self._device = device
        self._homes = homes
        self._slots = slots
        self.offsets, self.size_bytes = layout(storages_of(shards))
        homes.keep(index, [bytes_of(shard.memory) for shard in shards], self.offsets, self.size_bytes)
        self._slot: DeviceSlot | None = None
        self._arrived: Event = REACHED
        self._stored: Event = REACHED
        # Where the last gather has read them since they came.
        self._read_on: list[object] = []

    @property
    def is_loaded(self) -> bool:
        """Whether the shards are on the device or on their way."""
        return self._slot is not None

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that are trained."""
        return [shard.param for shard in self.shards if shard.param.requires_grad]

    def load(self) -> None:
        """Start the H2D copy into a slot, behind its last use and the last copy home."""
        self._device.refuse_capture("shard streaming")
        with deferred_interrupts():
            slot = self._slots.take()
            try:
                self._arrived = self._device.copy_in(
                    slot.bytes[: self.size_bytes],
                    self._homes.bytes_of(self.index),
                    after=(*slot.free, self._stored),
                )
            except BaseException:
                self._slots.give_back(slot, after=slot.free)
                raise
            self._slot = slot

    def wait(self) -> None:
        """Make the live current stream wait until they are there."""
        self._device.wait(self._arrived)

    def evict(self) -> None:
        """Give the slot back, behind the gathers that read it, the copy in and that home."""
        assert self._slot is not None
        read = []
        for stream in self._read_on:
            with self._device.on(stream):
                read.append(self._device.record())
        with deferred_interrupts():
            slot, self._slot, self._read_on = self._slot, None, []
            self._slots.give_back(slot, after=(*read, self._arrived, self._stored))

    def gather(self, index: int) -> torch.Tensor:
        """Return shard `index`, padded and flat, to a gather on the live current stream."""
        self.wait()
        stream = self._device.current_stream()
        if stream not in self._read_on:
            self._read_on.append(stream)
        memory = self.shards[index].memory
        return self.at(self.offsets[index], memory.nbytes).view(memory.dtype)

    def at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes from `offset` on the device, while they visit."""
        assert self._slot is not None
        return self._slot.bytes[offset : offset + size_bytes]

    def hold(self) -> Event:
        """Keep the shards, which are loaded, on the device until `stored`; return the event of their arrival."""
        self.is_held = True
        return self._arrived

    def stored(self, event: Event) -> None:
        """Take note that all that was written goes home until `event`."""
        self._stored, self.is_held = event, False

    def wait_stored(self) -> None:
        """Block until all that was written is home."""
        self._stored.synchronize()

    def home_of(self, index: int, visit: Callable[[], Event]) -> Home:
        """Return where the parameter of shard `index` lives."""
        return Home(self._homes, self, self.offsets[index], self.shards[index].param.to_local(), visit)

    def move_home(self) -> None:
        """Let parameters and gathers have the home as their memory; what the device has is freed."""
        whole = self._homes.bytes_of(self.index)
        for shard, offset in zip(self.shards, self.offsets, strict=True):
            memory = shard.memory
            shard.move_to(whole[offset : offset + memory.nbytes].view(memory.dtype))

    def move_to_device(self) -> None:
        """Give every shard device memory of its own, with what the home holds."""
        self.wait_stored()
        own = [shard.memory.to(self._device.torch_device, copy=True) for shard in self.shards]
        with deferred_interrupts():
            for shard, memory in zip(self.shards, own, strict=True):
                shard.move_to(memory)


class StreamedShards:
    """All blocks of a model, at most `prefetch + 1` of them on the device.

    The optimizer sees the homes of its parameters, and those that are on the device or on their way (`ahead`). Nothing
    is served before `start`. Raises HostMemoryError; then the model is as it was.
    """

    def __init__(
        self,
        device: Device,
        homes: Homes,
        shards: Sequence[Sequence[Shard]],
        *,
        prefetch: int,
        settle: Settle,
    ) -> None:
        self._homes = homes
        self._settle = settle
        self._kind = Kind.FORWARD
        self._is_stale = False
        self._slots = DeviceSlots(device, max(layout(storages_of(each))[1] for each in shards))
        self._blocks = [
            ShardBlock(device, homes, self._slots, each, index) for index, each in enumerate(shards)
        ]
        self.home_of: dict[torch.Tensor, Home] = {}
        self.block_of: dict[torch.Tensor, ShardBlock] = {}
        with deferred_interrupts():
            for block in self._blocks:
                block.move_home()
                for index, shard in enumerate(block.shards):
                    shard.serve(partial(self._gather, block, index))
                    self.block_of[shard.param] = block
                    self.home_of[shard.param] = block.home_of(index, partial(self._visit, block))
        self.window = Window(self._blocks, min(prefetch + 1, len(shards)))

    @property
    def ahead(self) -> list[torch.Tensor]:
        """The trained parameters that are on the device or on their way for the next gathers."""
        coming = {block.index for block in self.window.coming}
        return [param for block in self._blocks if block.index in coming for param in block.trained]

    def begin_forward(self, *, trains: bool) -> list[torch.Tensor]:
        """Take note that a forward begins, whose backward follows if it `trains`.

        Returns the trained parameters that somebody has written since the last one. Raises RuntimeError for one that
        has been replaced or moved.
        """
        self._kind = Kind.FORWARD if trains else Kind.EVALUATE
        written: list[torch.Tensor] = []
        for block in self._blocks:
            for shard in block.shards:
                if not shard.is_ours:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(shard.param.shape)} has been replaced or moved while its shards "
                        "stream; expected it to stay, and writes in place; try load_state_dict without assign=True, "
                        "and dtype or device before the streamer is made"
                    )
                if shard.written():
                    self._is_stale = True
                    written += [shard.param] if shard.param.requires_grad else []
        return written

    def reload(self) -> None:
        """Bring the shards anew that are on the device before they are used next: somebody has written their homes."""
        self._is_stale = True

    def on_host(self, param: torch.Tensor) -> torch.Tensor:
        """Return a parameter's new weight as a shard on the host: the same memory, in a storage of its own."""
        assert isinstance(param, DTensor)
        self.settle_at_home([param])
        local = self.home_of[param].host
        own = torch.from_numpy(local.view(torch.uint8).numpy()).view(local.dtype)
        return shard_like(param, own.view(param.to_local().shape))

    def settle_at_home(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Block until the weights of `params`, or all, are new at home."""
        blocks = (
            self._blocks if params is None else list(dict.fromkeys(map(self.block_of.__getitem__, params)))
        )
        for block in blocks:
            self._settle(block.trained, [])
        for block in blocks:
            block.wait_stored()

    def close(self) -> None:
        """Give every shard device memory of its own again, and the host memory back."""
        for block in self._blocks:
            block.move_to_device()
        self._homes.close()

    def _reload_stale(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self.window.reload()

    def _visit(self, block: ShardBlock) -> Event:
        self._reload_stale()
        self.window.bring(block)
        return block.hold()

    def _gather(self, block: ShardBlock, index: int) -> torch.Tensor:
        """Return a shard to a gather, whose first one says that its block is needed."""
        if index == 0:
            self._reload_stale()
            in_backward = torch._C._current_graph_task_id() != -1
            self.window.before_gather(block, Kind.BACKWARD if in_backward else self._kind)
            self._settle(block.trained, self.ahead)
        return block.gather(index)


def storages_of(shards: Iterable[Shard]) -> list[BlockStorage]:
    """Return the memory of `shards`, as other blocks describe theirs."""
    return [BlockStorage(("",), (shard.memory,)) for shard in shards]
