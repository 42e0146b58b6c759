"""Gradients that are offloaded in backward, those of a block together, and come back in one chunk with their states.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from reference_impl.optimizers.gradients.leaving import LeavingGradients
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.of_step import TakenGradients
from reference_impl.optimizers.layout import Member, Piece

# What an error advises whoever needs a gradient's values.
READ_IN_A_HOOK = "try param.register_hook(), which is given each gradient with its values in backward"


class BlockGradients(LeavingGradients):
    """The gradients of one optimizer, on the host from backward on; see `optimizers.gradients.of_step.StepGradients`.

    Args:
        mover: copies them, those of the CPU's members too.
    """

    def __init__(self, mover: GradientMover) -> None:
        super().__init__(
            mover, leave_in_backward=True, sharded_too=True, sums_stay=False, remedy=READ_IN_A_HOOK
        )
        # Of the block that backward is in, the gradients that are final; and how many there will be, by block.
        self._final: dict[Member, None] = {}
        self._in_block: Counter[int] = Counter()
        self._graph_task = -1

    def add(self, members: Iterable[Member], places: Mapping[Piece, torch.Tensor]) -> None:
        """Learn of new members, and where on the host the gradients of their pieces go."""
        self._host.add(places)
        for piece in places:
            piece.member.pieces.append(piece)
        self._in_block.update(member.home.block_index for member in members if member.home is not None)

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
        self.send_together(self._final)
        self._final.clear()

    def drain(self) -> None:
        """Let go of gradients that are on the host; waits for nothing."""
        self._host.drain()

    def drop(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that have left and were not used; a second one of a shard is refused again."""
        self.adds_shards = False
        super().drop(members)

    def to_use(
        self, members: Iterable[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return what stands for the gradients that are on the host, or on their way; sends those that are not."""
        listed = list(members)
        used = super().to_use(listed, wait_for)
        wait_for([member for member in listed if member.pending])
        return used

    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> TakenGradients:
        """Prepare a step that uses `gradients`; what stands on a parameter is read by nobody: the host has it all."""
        return super().prepare(gradients, returns_early=True)

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients."""
        super().begin(wait_for)
        self.adds_shards = False
