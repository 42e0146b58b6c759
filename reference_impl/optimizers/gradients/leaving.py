# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer's members: the offloaded ones, and the ones used by a step.

An offloaded gradient has a stand-in on its parameter's `.grad`. A step uses the gradient only if the stand-in is
still there: a user who drops or replaces it drops the gradient. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.clip_decision import norms_of
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.of_step import PreparedGradients, StepGradients
from reference_impl.optimizers.gradients.stand_in import REMEDY, GradientStandIn, second_gradient, unwrapped
from reference_impl.optimizers.gradients.used import RestOfStep
from reference_impl.optimizers.layout import Member, gradient_of

# References to a storage: from the tensor, and from its Python object here.
_USES_OF_ONE_TENSOR = 2


class LeavingGradients(StepGradients):
    """Sends gradients off and finds a step's gradients.

    Args:
        host: copies gradients to the host.
        leave_in_backward: gradients of members with a part on the host leave before `step()`.
        sharded_too: gradients of DTensors, too.
        sums_stay: offloaded gradients stay until `step()` once a second backward has added to them. Without it each sum
            leaves again.
        measures: norms are taken. Without it an update may use a gradient at once.
        remedy: the advice in an error about a gradient's missing values.

    `reduced_later` are the parameters with gradients reduced after autograd has accumulated them. `adds_shards`: a
    second gradient of a sharded parameter is added to the first.
    """

    def __init__(
        self,
        host: GradientMover,
        *,
        leave_in_backward: bool,
        sharded_too: bool,
        sums_stay: bool = True,
        measures: bool = True,
        remedy: str = REMEDY,
    ) -> None:
        self._host = host
        self.measures = measures
        self._sums_stay = sums_stay
        self._remedy = remedy
        self.may_leave = leave_in_backward
        self._sharded_too = sharded_too
        self._are_accumulated = False
        self._unplaced: dict[Member, torch.Tensor] = {}
        # The members of the prepared step, and their stand-ins.
        self._prepared: tuple[Sequence[Member], Mapping[Member, GradientStandIn]] = (), {}
        self.reduced_later: frozenset[torch.Tensor] = frozenset()
        self.adds_shards = False

    def leave_in_backward(self, member: Member, reduced: torch.Tensor | None = None) -> bool:
        """Return whether a member's gradient leaves before `step()`: the accumulated one, or `reduced`."""
        if isinstance(member.param, DTensor):
            return self.may_leave and self._sharded_too
        is_final = reduced is not None or member.param not in self.reduced_later
        return self.may_leave and not self._are_accumulated and is_final

    def put_arrived(self, member: Member) -> None:
        """Put autograd's sum in the place of its stand-in.

        Raises RuntimeError for a lost sum before its reduction.
        """
        stands = unwrapped(member.param.grad)
        if isinstance(stands, GradientStandIn):
            if stands.arrived is not None:
                member.put(stands.arrived)
            elif stands.is_stale and member.param in self.reduced_later:
                raise second_gradient(stands)

    def keep(self, member: Member) -> None:
        """Let an accumulated gradient stay on the parameter, in memory of its own if it leaves later.

        Torch may have given one memory to the gradients of two parameters, and would add the next ones to both at once.
        """
        self.put_arrived(member)
        is_ours = not isinstance(member.param, DTensor) and member.param not in self.reduced_later
        if self.may_leave and member.pieces and is_ours:
            _own_memory(member)

    def send(self, member: Member, reduced: torch.Tensor | None = None) -> bool:
        """Offload a gradient and put a stand-in in its place; changes nothing when it raises.

        A `reduced` gradient is not on its parameter yet: `place` puts its stand-in there. Returns False if nothing is
        sent, because the sum with a used gradient is lost.
        """
        self.put_arrived(member)
        if reduced is None and isinstance(unwrapped(member.param.grad), GradientStandIn):
            return False
        if reduced is None and not isinstance(member.param, DTensor):
            # A gradient in the same memory may be scaled during this one's copy.
            _own_memory(member)
        # The last gradient's stand-in has been dropped, and with it that gradient.
        self._host.discard([member])
        gradient = self._host.offload(member, measure=self.measures and reduced is None, reduced=reduced)
        if reduced is not None:
            self._unplaced[member] = member.placeholder = reduced
        else:
            self._stand_in(member, gradient, self._host.norms.get(member))
        return True

    def send_together(self, members: Iterable[Member]) -> None:
        """Do as `send` for members that are not sharded, with one event for all copies.

        Members with dropped gradients are left out. After an error the same call sends the rest.
        """
        here = []
        for member in members:
            self.put_arrived(member)
            if member.gradient is not None and not isinstance(member.gradient, GradientStandIn):
                here.append(member)
        if here:
            self._host.discard(here)
            for member, gradient in zip(here, self._host.offload_together(here), strict=True):
                self._stand_in(member, gradient, self._host.norms[member])

    def place(self, member: Member, reduced: torch.Tensor) -> None:
        """Put a stand-in in the place of a gradient sent as `reduced`, now on its parameter.

        If the parameter has no gradient, no rank has used it, and the sent one is dropped.
        """
        if self._unplaced.pop(member, None) is not reduced:
            return
        if member.param.grad is None:
            self._host.discard([member])
            return
        norm = norms_of([reduced])[0] if self.measures else None
        self._stand_in(member, reduced, norm)

    def _stand_in(self, member: Member, gradient: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Put a stand-in for the sent `gradient` on the parameter."""
        kept = gradient if member.on_device else None
        # A gradient that stays from then on must not have been rounded.
        may_come_back = self.measures and (gradient.dtype == member.param.dtype or not self._sums_stay)
        is_shard = isinstance(member.param, DTensor)
        member.placeholder = GradientStandIn(
            gradient,
            norm,
            kept=kept,
            kept_part=None if kept is None else member.flat(kept)[: member.on_device],
            used=not self.measures,
            recall=self._recalled(member) if may_come_back or is_shard else None,
            remedy=self._remedy,
            owner=id(member),
        )
        member.put(member.placeholder)

    def _recalled(self, member: Member) -> Callable[[bool], torch.Tensor]:
        """Return a function that calls `_recall` without keeping this object alive."""
        recall = weakref.WeakMethod(self._recall)

        def call(by_backward: bool) -> torch.Tensor:
            bound = recall()
            if bound is None:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(member.param.shape)} went with its optimizer; "
                    "expected an optimizer that lives until gradients are dropped; try zero_grad() on the model"
                )
            return bound(member, by_backward)

        return call

    def _recall(self, member: Member, by_backward: bool) -> torch.Tensor:
        """Bring a gradient back because something is added to it; changes nothing when it raises.

        After another backward's addition, gradients wait for `step()` from now on.
        """
        is_shard = isinstance(member.param, DTensor)
        if is_shard and not (self.measures and (member.on_device or self.adds_shards)):
            raise checks.first_gradient_has_left(member)
        stand_in = member.placeholder
        assert isinstance(stand_in, GradientStandIn)
        gradient = torch.empty_like(member.param_local, memory_format=torch.preserve_format)
        flat = member.flat(gradient)
        self._host.bring_back(member, flat)
        for factor in stand_in.factors:
            flat[member.on_device :].mul_(factor)
        if stand_in.kept_part is not None:
            flat[: member.on_device].copy_(stand_in.kept_part)
        self._host.discard([member])
        if by_backward and self._sums_stay and not (self._are_accumulated or is_shard):
            self._are_accumulated = True
            checks.warn_accumulated()
        return gradient

    def to_use(
        self, members: Iterable[Member], wait_for: Callable[[Iterable[Member]], None]
    ) -> dict[Member, torch.Tensor]:
        """Return gradients as `StepGradients.to_use`; gradients here that have to go to the host are sent."""
        listed = [member for member in members if member not in self.used_in_backward]
        wait_for(self.used_by_nobody(listed))
        used: dict[Member, torch.Tensor] = {}
        for member in listed:
            gradient = self._of_next_step(member)
            if member.arrival is not None and not member.on_device:
                # The host gets all of it, and the device's memory is free after the copy.
                assert member.placeholder is not None
                used[member] = member.placeholder
            elif gradient is not None:
                used[member] = gradient
        checks.check_used_in_time(used)
        return used

    def _of_next_step(self, member: Member) -> torch.Tensor | None:
        """Return a member's gradient, laid out; of an offloaded one the part kept on the device.

        A gradient still on the device that has to go to the host is sent off.
        """
        found = member.gradient
        if isinstance(found, GradientStandIn):
            if found.dropped:
                found = found.in_its_place(member.param_local)
                member.put(found)
            elif found is not member.placeholder:
                is_anothers = found.owner not in (None, id(member)) and not found.used
                raise checks.of_another_parameter(member) if is_anothers else checks.used_twice(member)
            else:
                return found.kept
        # The earlier gradient was dropped, replaced, or sent off by a step that failed before it began.
        self._host.discard([member])
        if found is None:
            return None
        if not member.pieces:
            return gradient_of(member)
        gradient = self._host.offload(member, measure=self.measures)
        member.placeholder = found
        return gradient

    def _check_used_stand(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError for a dropped or replaced gradient of one of `members` with a begun update.

        Their stand-ins are put back: the step goes on with the gradients of backward.
        """
        changed = [member for member in members if not _has_stand_in(member)]
        for member in changed:
            stand_in = GradientStandIn(
                member.param_local, None, used=True, remedy=self._remedy, owner=id(member)
            )
            member.put(stand_in)
        if changed:
            raise checks.used_is_replaced(changed[0].param)

    @staticmethod
    def used_by_nobody(members: Iterable[Member]) -> list[Member]:
        """Return the `members` with a gradient and a pending new weight: nobody used the weight, so nobody waited.

        Either the gradient was set to zero, or the weight only visits the device for its uses.
        """
        found = []
        for member in members:
            if member.pending:
                stands = member.gradient
                zeroed = isinstance(stands, GradientStandIn) and stands.dropped and stands.arrived is None
                if stands is not None and (zeroed or member.home is not None):
                    found.append(member)
        return found

    def norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the fp32 norms of all gradients, as they are now: first of sent gradients, if they have one."""
        norms = []
        for member in (member for member in gradients if member.arrival is not None):
            stand_in, norm = member.placeholder, self._host.norms.get(member)
            if isinstance(stand_in, GradientStandIn):
                norm = None if stand_in.l2_norm is None else stand_in.scaled_norm()
            if norm is not None:
                norms.append(norm)
        return norms + norms_of(each for member, each in gradients.items() if member.arrival is None)

    def prepare(self, gradients: Mapping[Member, torch.Tensor], *, returns_early: bool) -> PreparedGradients:
        """Prepare a step that uses `gradients`: from its begin on stand-ins are on their parameters.

        Members whose update began in backward are left out if their stand-in was replaced.
        """
        placed = ((member, unwrapped(member.param.grad)) for member in self.used_in_backward)
        found = {member: stands for member, stands in placed if isinstance(stands, GradientStandIn)}
        for member in gradients:
            now = unwrapped(member.param.grad)
            if isinstance(now, GradientStandIn):
                found[member] = now
            elif returns_early and now is not None and self._is_read_later(member):
                # A later write into the gradient must not meet the update that still reads it.
                found[member] = GradientStandIn(now, None, remedy=self._remedy)
        self._prepared = list(gradients), found
        return PreparedGradients(
            {member: member.arrival for member in gradients if member.arrival is not None},
            {member: list(each.factors) for member, each in found.items() if each.factors},
            found,
        )

    def _is_read_later(self, member: Member) -> bool:
        """Return whether an update reads the gradient on the parameter of `member` behind `step()`."""
        is_read = bool(member.pieces) or member.streamed > 0
        return is_read and member.gradient is member.param.grad and not isinstance(member.param, DTensor)

    def begin(self, wait_for: Callable[[Sequence[Member]], None] | None) -> None:
        """Let the prepared step own its gradients; their stand-ins are on the parameters now."""
        self.backward_part = self.rest = None
        (members, stand_ins), self._prepared = self._prepared, ((), {})
        for member, stand_in in stand_ins.items():
            stand_in.use()
            if unwrapped(member.param.grad) is not stand_in:
                member.put(stand_in)
        self._host.let_go(members)

    def note_rest(self, members: Iterable[Member], *, checks_used: bool = True) -> None:
        """Note the rest of a step that backward has begun, see `StepGradients.note_rest`."""
        if self.backward_part is not None and self.rest is None:
            if checks_used:
                self._check_used_stand(self.used_in_backward)
            self.rest = RestOfStep(members)

    def drop(self, members: Iterable[Member]) -> None:
        """Forget offloaded, unused gradients of `members`."""
        self._host.discard(members)

    def being_read(self, members: Iterable[Member]) -> list[Member]:
        """Return the `members` with their gradient itself in place and without a waiter for the new weight."""
        self._host.fence()
        return [m for m in members if m.pending and not isinstance(m.gradient, GradientStandIn | None)]

    def forget(self) -> None:
        """Let go of all gradients."""
        self.backward_part, self.rest, self._prepared = None, None, ((), {})


def _has_stand_in(member: Member) -> bool:
    stands = member.gradient
    return isinstance(stands, GradientStandIn) and stands.owner in (None, id(member)) and not stands.dropped


def _own_memory(member: Member) -> None:
    """Copy a gradient that shares its memory: with `a + b` both may have one gradient."""
    gradient = member.param.grad
    if gradient is None or isinstance(gradient, GradientStandIn) or gradient.layout != torch.strided:
        return
    storage = gradient.untyped_storage()
    shared = torch._C._storage_Use_Count(storage._cdata) > _USES_OF_ONE_TENSOR
    # Slices of one buffer do not overlap.
    if shared and storage.nbytes() == gradient.nbytes:
        member.param.grad = gradient.clone()


def factors_of(members: Iterable[Member]) -> tuple[list[torch.Tensor | float], dict[Member, list[int]]]:
    """Return all factors of the gradients of `members`, and for each member its factors' indices, in order."""
    places: dict[int, int] = {}
    factors: list[torch.Tensor | float] = []
    indices: dict[Member, list[int]] = {}
    for member in members:
        stand_in = member.placeholder
        if isinstance(stand_in, GradientStandIn) and stand_in.factors:
            indices[member] = []
            for factor in stand_in.factors:
                if id(factor) not in places:
                    places[id(factor)] = len(factors)
                    factors.append(factor)
                indices[member].append(places[id(factor)])
    return factors, indices
