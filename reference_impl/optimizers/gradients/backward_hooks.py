# SPDX-License-Identifier: Apache-2.0
"""An optimizer's notice of final gradients in backward.

A gradient is final once autograd has accumulated it, and under DistributedDataParallel once it is reduced. DDP reads it
from the parameter before that, and puts it back at the end of backward: in between it is in a bucket.

Explained in docs/optimizer-offloading.md and docs/distributed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reference_impl.device import Device
from reference_impl.distributed.ddp import Reduced, ReducedGradients, data_parallels, foreign_hook
from reference_impl.memory.closing import do_undoably, undo_all
from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.leaving import LeavingGradients
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.model_hooks import forgetful


class GradientHooks:
    """Calls `hook` with a parameter after autograd has accumulated its gradient, which it then has.

    If an earlier hook of the user's has dropped the gradient, there is no call.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        def unless_dropped(param: torch.Tensor) -> None:
            if param.grad is not None:
                hook(param)

        # A parameter that has it keeps nothing else here alive.
        self._hook = unless_dropped
        self._heard: set[torch.Tensor] = set()
        self._undo: list[Callable[[], None]] = []

    def hear(self, params: Iterable[torch.Tensor]) -> None:
        """Hear of the gradients of `params` too; of one that is heard already not twice."""
        for param in params:
            if param not in self._heard:
                do_undoably(partial(self._register, param), self._undo)

    def _register(self, param: torch.Tensor) -> Callable[[], None]:
        handle = param.register_post_accumulate_grad_hook(self._hook)
        self._heard.add(param)

        def undo() -> None:
            handle.remove()
            self._heard.discard(param)

        return undo

    def close(self) -> None:
        """Hear of nothing any more."""
        undo_all(self._undo)


class BackwardHooks:
    """The hooks of one optimizer on its parameters, and on an attached model of DDP's.

    Args:
        device: where the parameters are.
        members: the trained parameters; more may come.
        gradients: the gradients that leave in backward; it learns the reduced ones.
        on_gradient: called with a parameter after autograd has accumulated its gradient, or with a parameter and its
            gradient once its reduction is queued; copies to the host wait for that. Its owner is not kept alive.
    """

    def __init__(
        self,
        device: Device,
        members: Mapping[torch.Tensor, Member],
        gradients: LeavingGradients,
        on_gradient: Callable[..., None],
    ) -> None:
        self._device, self._members, self._gradients = device, members, gradients
        self._on_gradient = forgetful(on_gradient)
        self._hooks = GradientHooks(self._on_gradient)
        self._reductions: list[ReducedGradients] = []

    def hear(self, members: Sequence[Member], *, where_they_leave: bool) -> None:
        """Hook the accumulated gradients of `members`, or only the gradients that leave in backward."""
        gradients = self._gradients
        sent = [member for member in members if member.pieces and gradients.leave_in_backward(member)]
        leaving = set(sent)
        kept = [m for m in members if m not in leaving and m.param not in gradients.reduced_later]
        if gradients.may_leave and any(member.pieces for member in kept):
            checks.warn_kept_gradients()
        self._hear(sent if where_they_leave else members)

    def _hear(self, members: Iterable[Member]) -> None:
        # Megatron's shards require no gradient: theirs are put on them.
        self._hooks.hear(member.param for member in members if member.param.requires_grad)

    def check(self, model: nn.Module, split: Sequence[float]) -> None:
        """Raise ValueError for a DDP in `model` that cannot be served; every rank of it has to call this."""
        for parallel in data_parallels(model):
            if self._gradients.may_leave and not self._gradients.measures:
                checks.check_unused(parallel)
            splits: list[Any] = [None] * parallel.process_group.size()
            dist.all_gather_object(splits, tuple(split), group=parallel.process_group)
            checks.check_same_split(splits)

    def attach(self, model: nn.Module) -> None:
        """Hear of the gradients that DDP reduces in `model`, if some of them leave, and of no other model's.

        Beside another communication hook gradients stay on the parameters, with a warning.
        """
        self._stop_listening()
        parallels = data_parallels(model)
        within = frozenset(param for parallel in parallels for param in parallel.parameters())
        self._gradients.reduced_later = within
        # Once autograd has added to a stand-in, a gradient that DDP can read takes its place.
        members = [self._members[param] for param in within if param in self._members]
        self._hear(members)
        some_leave = self._gradients.may_leave and any(member.pieces for member in members)
        on_gradient = self._on_gradient
        for parallel in parallels if some_leave else ():
            other = foreign_hook(parallel)
            if other is not None:
                checks.warn_foreign_hook(other)
                continue
            self._reductions.append(
                ReducedGradients(
                    parallel,
                    self._device,
                    on_reduced=self._of_members(lambda member, reduced: on_gradient(member.param, reduced)),
                    on_placed=self._of_members(self._gradients.place),
                )
            )

    def _of_members(self, call: Callable[[Member, torch.Tensor], None]) -> Callable[[Reduced], None]:
        """Return a function that makes the `call` for each member's gradient in a bucket."""
        members = self._members

        @torch.no_grad()
        def of_bucket(reduced: Reduced) -> None:
            for param, gradient in reduced:
                if param in members:
                    call(members[param], gradient)

        return of_bucket

    def close(self) -> None:
        """Hear of nothing any more."""
        self._stop_listening()
        self._hooks.close()

    def _stop_listening(self) -> None:
        for each in self._reductions:
            each.close()
        self._reductions.clear()
