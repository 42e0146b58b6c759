"""Gradients that are offloaded in backward, those of a block together, and come back in one chunk with their states.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import Device
from reference_impl.optimizers.cpu.gradient_mover import GradientMover
from reference_impl.optimizers.gradients import Gradients, put_in_place
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.stand_in import GradientStandIn
from reference_impl.optimizers.streamed.gradients import TakenGradients

# What an error advises whoever needs a gradient's values.
READ_IN_A_HOOK = "try param.register_hook(), which is given each gradient with its values in backward"


class ChunkGradients:
    """Where gradients go that come back with their chunk, as `gradients.HostGradients`."""

    def __init__(self, device: Device, mover: GradientMover) -> None:
        self._device = device
        self._mover = mover

    @property
    def norms(self) -> dict[Member, torch.Tensor]:
        """The fp32 norms (0-dim, on the device) of the gradients sent off, as they were then."""
        return self._mover.norms

    def add(self, places: Mapping[Piece, torch.Tensor]) -> None:
        """Learn where the gradients of new pieces go."""
        self._mover.add(places)

    def offload(self, member: Member, *, measure: bool, reduced: torch.Tensor | None = None) -> torch.Tensor:
        """Start the copy of a gradient, see `GradientMover`; return it, laid out like the parameter."""
        return self._mover.offload(member, measure=measure, reduced=reduced)

    def bring_back(self, member: Member, target: torch.Tensor) -> None:
        """Start the copy of a gradient that has not been used into `target`, one-dimensional."""
        self._mover.bring_back(member, target)

    def offload_together(self, members: Sequence[Member]) -> list[torch.Tensor]:
        """Start the copies of gradients, see `GradientMover`; return them, laid out like the parameters."""
        return self._mover.offload_together(members)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that will not be used."""
        for member in members:
            if member.arrival is not None:
                self._device.wait(member.arrival)
                self.take([member])

    def take(self, members: Iterable[Member]) -> None:
        """Let a step own the gradients of `members`."""
        for member in members:
            member.arrival = member.placeholder = None
            self._mover.norms.pop(member, None)

    def drain(self) -> None:
        """Let go of gradients that are on the host; waits for nothing."""
        self._mover.drain()


class LeavingGradients:
    """The gradients of one optimizer, on the host from backward on; see `streamed.gradients.StepGradients`.

    Args:
        device: where they are made.
        mover: copies them, those of the CPU's members too.
    """

    def __init__(self, device: Device, mover: GradientMover) -> None:
        self._store = ChunkGradients(device, mover)
        self._sent = Gradients(
            self._store, leave_in_backward=True, sharded_too=True, sums_stay=False, remedy=READ_IN_A_HOOK
        )
        # Of the block that backward is in, the gradients that are final; and how many there will be, by block.
        self._final: dict[Member, None] = {}
        self._in_block: Counter[int] = Counter()
        self._graph_task = -1
        self._prepared: tuple[Mapping[Member, torch.Tensor], Mapping[Member, GradientStandIn]] = {}, {}

    def add(self, members: Iterable[Member], places: Mapping[Piece, torch.Tensor]) -> None:
        """Learn of new members, and where on the host the gradients of their pieces go."""
        self._store.add(places)
        for piece in places:
            piece.member.pieces.append(piece)
        self._in_block.update(member.home.block_index for member in members if member.home is not None)

    def add_shards(self, adds: bool) -> None:
        """From now on add a second gradient of a shard to the first, or refuse it."""
        self._sent.adds_shards = adds

    def leaves_with_block(self, member: Member) -> bool:
        """Return whether the gradient of `member` waits for the others of its block."""
        return member.home is not None and not isinstance(member.param, DTensor)

    def note_final(self, member: Member, send: Callable[[], None]) -> None:
        """Note a final gradient of a block; `send` is called once those of the block are all there, or can be."""
        assert member.home is not None
        block = member.home.block_index
        before = next(iter(self._final), member)
        if before.home is not None and before.home.block_index != block:
            send()
        task = torch._C._current_graph_task_id()
        if self._graph_task != task != -1:
            # For a block that has a parameter without a gradient.
            torch.autograd.Variable._execution_engine.queue_callback(send)
            self._graph_task = task
        self._final[member] = None
        if len(self._final) == self._in_block[block]:
            send()

    @property
    def are_final(self) -> bool:
        """Whether gradients of a block are final and have not been sent."""
        return bool(self._final)

    def send_final(self) -> None:
        """Send those of a block that are final, unless they have been dropped."""
        self._sent.send_together(self._final, self._store.offload_together)
        self._final.clear()

    def send(self, member: Member) -> None:
        """Send one gradient that is final."""
        self._sent.send(member)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that will not be used."""
        self._store.discard(members)

    def drain(self) -> None:
        """Let go of gradients that are on the host; waits for nothing."""
        self._store.drain()

    def to_use(
        self, members: Collection[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return what stands for the gradients that are on the host, or on their way; sends those that are not."""
        wait_for(self._sent.used_by_nobody(members))
        used: dict[Member, torch.Tensor] = {}
        for member in members:
            self._sent.to_use(member)
            if member.arrival is not None:
                assert member.placeholder is not None
                used[member] = member.placeholder
        return used

    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the norms (fp32, 0-dim), in the order of `gradients`: the sum of squares depends on it."""
        return [
            gradient.scaled_norm() if isinstance(gradient, GradientStandIn) else self._store.norms[member]
            for member, gradient in gradients.items()
        ]

    def prepare(self, gradients: Mapping[Member, torch.Tensor]) -> TakenGradients:
        """Prepare a step that uses `gradients`; changes nothing."""
        arrived = {member: member.arrival for member in gradients if member.arrival is not None}
        stand_ins = self._sent.stand_ins(arrived, {}, returns_early=True)
        self._prepared = gradients, stand_ins
        factors = {member: list(each.factors) for member, each in stand_ins.items() if each.factors}
        return TakenGradients(arrived, factors, stand_ins)

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients; nothing that stands on a parameter is read: the host has it all."""
        (gradients, stand_ins), self._prepared = self._prepared, ({}, {})
        put_in_place(stand_ins)
        self._store.take(gradients)

    def end(self, members: Iterable[Member]) -> torch.Tensor | None:
        """Return None: nobody can write a gradient that is on the host."""
        return None

    def forget(self) -> None:
        """Let go of what is prepared."""
        self._prepared = {}, {}

    @property
    def are_read(self) -> bool:
        """Whether an update still reads gradients where they stand: never."""
        return False
