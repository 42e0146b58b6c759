# SPDX-License-Identifier: Apache-2.0
"""The gradients of streamed trained layers: `BlockGradients` leave in backward, `PassedGradients` are used there.

A block's gradients leave together, and come back in one chunk with their states. Others stay on the device until
backward has passed their block, and their update begins.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import REACHED
from reference_impl.optimizers import checks
from reference_impl.optimizers.cpu.step import CpuStep
from reference_impl.optimizers.gradients.leaving import LeavingGradients
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.of_step import PreparedGradients
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.layout import Member, Piece, gradient_of

# The advice in an error about a gradient's missing values.
READ_IN_A_HOOK = "try param.register_hook(), which is given each gradient with its values in backward"


# The number of no backward, as autograd numbers them.
_NO_BACKWARD = -1


class BlockGradients(LeavingGradients):
    """The gradients of one optimizer, on the host from backward on; see `optimizers.gradients.of_step.StepGradients`.

    Args:
        mover: copies them, also the gradients of the CPU's members.
    """

    def __init__(self, mover: GradientMover) -> None:
        super().__init__(
            mover, leave_in_backward=True, sharded_too=True, sums_stay=False, remedy=READ_IN_A_HOOK
        )
        # The final gradients of the block in backward; and how many there will be, by block.
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
        """Note a final gradient of a block; `send` is called once all gradients of the block are there, or can be."""
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
        """Send the final gradients of a block, unless they have been dropped."""
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
        """Return the stand-ins of gradients that are on the host, or on their way; sends the others."""
        listed = list(members)
        used = super().to_use(listed, wait_for)
        wait_for([member for member in listed if member.pending])
        return used

    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> PreparedGradients:
        """Prepare a step that uses `gradients`; nobody reads a gradient on a parameter: the host has it all."""
        return super().prepare(gradients, returns_early=True)

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients."""
        super().begin(wait_for)
        self.adds_shards = False


class PassedGradients(LeavingGradients):
    """The gradients of one optimizer that stay on the device, and are used once backward has passed their block.

    Args:
        mover: never has a gradient: none leaves.
    """

    begins_whole = True

    def __init__(self, mover: GradientMover) -> None:
        super().__init__(
            mover, leave_in_backward=True, sharded_too=False, measures=False, remedy=READ_IN_A_HOOK
        )
        # Gradients that are final and wait for their update.
        self._final: dict[Member, torch.Tensor] = {}
        # The backward that has begun to update, until it has ended well.
        self._backward = _NO_BACKWARD
        self._has_failed = False

    def note_backward(self) -> None:
        """Note that this backward has begun to update, if it has."""
        if self.backward_part is not None:
            self._backward = torch._C._current_graph_task_id()

    def end_backward(self) -> None:
        """Note that this backward has ended well."""
        self._backward = _NO_BACKWARD

    def fail_backward(self) -> None:
        """Note an error: it ends this backward if an update has begun."""
        if (
            self.backward_part is not None
            and self._backward == torch._C._current_graph_task_id() != _NO_BACKWARD
        ):
            self._has_failed = True

    def cut_short(self) -> Exception | None:
        """Return the error of a backward that has failed with updates begun: nothing runs in it any more."""
        is_outside = torch._C._current_graph_task_id() == _NO_BACKWARD
        if not self._has_failed and not (is_outside and self._backward != _NO_BACKWARD):
            return None
        return RuntimeError(
            "backward has failed after it had begun to update, so some weights are of its batch and others are not; "
            "expected a backward that ends; try backward_overlap='gradients', where such a batch can be left out"
        )

    @property
    def are_final(self) -> bool:
        """Whether gradients are final and wait for their update."""
        return bool(self._final)

    def keep(self, member: Member) -> None:
        """Keep a final gradient until its update, and put a stand-in in its place; changes nothing when it raises.

        Raises RuntimeError for a second one, where the update has begun with the first.
        """
        if member in self.used_in_backward:
            raise _second_gradient(member)
        param, found = member.param, member.gradient
        if isinstance(found, GradientStandIn) and found.is_stale:
            return
        checks.check_used_in_time([member])
        if isinstance(found, GradientStandIn) and found.dropped:
            param.grad = found.in_its_place(param)
        gradient = gradient_of(member)
        # A sum in fp32 is rounded once, as where it leaves.
        self._final[member] = gradient.to(param.dtype)
        param.grad = member.placeholder = _stand_in(member, gradient)

    def passed(self) -> dict[Member, torch.Tensor]:
        """Return the gradients that backward has done with.

        Dropping a gradient before any was used leaves the batch out.
        """
        return {m: g for m, g in self._final.items() if _stands(m) or self.backward_part is not None}

    def begin_passed(self, part: CpuStep, gradients: Iterable[Member]) -> None:
        """Let the step's `part` own `gradients`; gradients dropped before are forgotten."""
        part.arrivals.update(dict.fromkeys(gradients, REACHED))
        self.backward_part = part
        self._final.clear()

    def to_use(
        self, members: Iterable[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return the gradients unused by backward, and gradients put on parameters by other code."""
        listed = list(members)
        used = super().to_use(listed, wait_for)
        wait_for([member for member in listed if member.pending])
        return used

    def _of_next_step(self, member: Member) -> torch.Tensor | None:
        if _stands(member) and member in self._final:
            return self._final[member]
        self._final.pop(member, None)
        found = member.gradient
        if isinstance(found, GradientStandIn) and found.is_over and not found.dropped:
            raise checks.used_twice(member)
        return super()._of_next_step(member)

    def _check_used_stand(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError for `members` with a begun update and a dropped or replaced gradient.

        Stand-ins are put back, so that the next step goes on with all gradients of backward.
        """
        changed = [member for member in members if not _stands(member)]
        if not changed:
            return
        for member in (*members, *self._final):
            assert member.placeholder is not None
            member.param.grad = member.placeholder = _stand_in(member, member.placeholder)
        raise checks.used_is_replaced(changed[0].param)

    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> PreparedGradients:
        """Prepare a step with `gradients`, read behind `step()`; changes nothing."""
        return super().prepare(gradients, returns_early=True)

    def _is_read_later(self, member: Member) -> bool:
        return True

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients."""
        super().begin(wait_for)
        self._final.clear()

    def drop(self, members: Iterable[Member]) -> None:
        """Forget the gradients that wait for their update."""
        self._final.clear()

    def forget(self) -> None:
        """Let go of all gradients."""
        super().forget()
        self._final.clear()


def _stand_in(member: Member, gradient: torch.Tensor) -> GradientStandIn:
    """Return the stand-in of a gradient before or during its update."""
    return GradientStandIn(gradient, None, used=True, recall=_refuse_second(member), remedy=READ_IN_A_HOOK)


def _stands(member: Member) -> bool:
    """Return whether the stand-in for a member's gradient is on its parameter and stands for it."""
    stands = member.placeholder
    return member.param.grad is stands and not (isinstance(stands, GradientStandIn) and stands.dropped)


def _second_gradient(member: Member) -> RuntimeError:
    return RuntimeError(
        f"a second gradient of a parameter of shape {tuple(member.param.shape)} came before step(), and backward had "
        "started the update with the first; expected one backward a step; try a larger batch with slices=, or "
        "backward_overlap='gradients'"
    )


def _refuse_second(member: Member) -> Any:
    """Return a function that raises if another backward adds to the gradient of `member`."""

    def refuse(by_backward: bool) -> NoReturn:
        raise _second_gradient(member)

    return refuse
