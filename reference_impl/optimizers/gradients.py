"""The gradients of an optimizer's members: which have been offloaded, and which of them a step uses.

An offloaded gradient has a stand-in on its parameter's `.grad`. A step uses the gradient only if the stand-in is
still there: a user who drops or replaces it drops the gradient. Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import Event
from reference_impl.optimizers import checks
from reference_impl.optimizers.clip_decision import norms_of
from reference_impl.optimizers.gradient_in_use import itself
from reference_impl.optimizers.layout import Member, gradient_of
from reference_impl.optimizers.stand_in import REMEDY, GradientStandIn, second_gradient, unwrapped
from reference_impl.optimizers.step import WorkLostError

# Of a storage: by the tensor, and by the object that stands for the storage here.
_USES_OF_ONE_TENSOR = 2


class HostGradients(Protocol):
    """Where gradients are sent: those of members with pieces on the host."""

    @property
    def norms(self) -> Mapping[Member, torch.Tensor]:
        """The fp32 norms (0-dim, on the device) of the gradients sent off, as they were then."""

    def offload(self, member: Member, *, measure: bool, reduced: torch.Tensor | None = None) -> torch.Tensor:
        """Start the copy of a gradient, with `measure` its norm too; return it, laid out like the parameter.

        It stands on the parameter, or is `reduced`, which stands elsewhere and stays there. Changes nothing when it
        raises.
        """

    def bring_back(self, member: Member, target: torch.Tensor) -> None:
        """Start the copy of a gradient that was sent off and has not been used into `target`, one-dimensional."""

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that were sent off but will not be used."""


class Gradients:
    """Sends gradients off and finds those of a step.

    Args:
        shares: where they go.
        leave_in_backward: gradients of members with a part on the host leave before `step()`.
        sharded_too: those of DTensors, too.
        sums_stay: once a second backward has added to gradients that had left, they stay until `step()`. Without it
            each sum leaves again.
        measures: norms are taken. Without it an update may use a gradient at once.
        remedy: the advice of an error to whoever needs a gradient's values.

    `reduced_later` are the parameters whose gradients somebody reduces once autograd has accumulated them.
    `adds_shards` says that a second gradient of a sharded parameter is added to the first.
    """

    def __init__(
        self,
        shares: HostGradients,
        *,
        leave_in_backward: bool,
        sharded_too: bool,
        sums_stay: bool = True,
        measures: bool = True,
        remedy: str = REMEDY,
    ) -> None:
        self._shares = shares
        self.measures = measures
        self._sums_stay = sums_stay
        self._remedy = remedy
        self.may_leave = leave_in_backward
        self._sharded_too = sharded_too
        self._are_accumulated = False
        self._unplaced: dict[Member, torch.Tensor] = {}
        self.reduced_later: frozenset[torch.Tensor] = frozenset()
        self.adds_shards = False

    def leave_in_backward(self, member: Member, reduced: torch.Tensor | None = None) -> bool:
        """Return whether a member's gradient leaves before `step()`: the accumulated one, or `reduced`."""
        if isinstance(member.param, DTensor):
            return self.may_leave and self._sharded_too
        is_final = reduced is not None or member.param not in self.reduced_later
        return self.may_leave and not self._are_accumulated and is_final

    def put_arrived(self, member: Member) -> None:
        """Put the sum that autograd has made in the place of the stand-in to which it was added.

        Raises RuntimeError for a sum that is lost where somebody is about to reduce it.
        """
        stands = unwrapped(member.param.grad)
        if isinstance(stands, GradientStandIn):
            if stands.arrived is not None:
                member.put(stands.arrived)
            elif stands.is_stale and member.param in self.reduced_later:
                raise second_gradient(stands)

    def keep(self, member: Member) -> None:
        """Let an accumulated gradient stay on the parameter, in memory of its own where it leaves later.

        Torch may have given one memory to the gradients of two parameters, and would add the next ones to both at once.
        """
        self.put_arrived(member)
        is_ours = not isinstance(member.param, DTensor) and member.param not in self.reduced_later
        if self.may_leave and member.pieces and is_ours:
            _own_memory(member)

    def send(self, member: Member, reduced: torch.Tensor | None = None) -> bool:
        """Offload a gradient and put a stand-in in its place; changes nothing when it raises.

        One that is `reduced` is not on its parameter yet: `place` puts the stand-in there. Returns False where nothing
        is sent, because the sum with a gradient that was used is lost.
        """
        self.put_arrived(member)
        if reduced is None and isinstance(unwrapped(member.param.grad), GradientStandIn):
            return False
        if reduced is None and not isinstance(member.param, DTensor):
            # Somebody may scale the other gradient while this one is copied.
            _own_memory(member)
        # Whoever has let go of the last one's stand-in does not want that gradient any more.
        self._shares.discard([member])
        gradient = self._shares.offload(member, measure=self.measures and reduced is None, reduced=reduced)
        if reduced is not None:
            self._unplaced[member] = member.placeholder = reduced
        else:
            self._stand_in(member, gradient, self._shares.norms.get(member))
        return True

    def send_together(
        self, members: Iterable[Member], offload: Callable[[Sequence[Member]], list[torch.Tensor]]
    ) -> None:
        """Do as `send` for members that are not sharded, by `offload`, which starts all copies.

        Those whose gradients have been dropped are left out. After an error the same call sends the rest.
        """
        here = []
        for member in members:
            self.put_arrived(member)
            if member.gradient is not None and not isinstance(member.gradient, GradientStandIn):
                here.append(member)
        if here:
            self._shares.discard(here)
            for member, gradient in zip(here, offload(here), strict=True):
                self._stand_in(member, gradient, self._shares.norms[member])

    def place(self, member: Member, reduced: torch.Tensor) -> None:
        """Put a stand-in in the place of a gradient that has been sent `reduced` and stands on its parameter now.

        Where nothing stands there, no rank has used the parameter, and the gradient is dropped.
        """
        if self._unplaced.pop(member, None) is not reduced:
            return
        if member.param.grad is None:
            self._shares.discard([member])
            return
        norm = norms_of([reduced])[0] if self.measures else None
        self._stand_in(member, reduced, norm)

    def _stand_in(self, member: Member, gradient: torch.Tensor, norm: torch.Tensor | None) -> None:
        """Put a stand-in for `gradient`, which has been sent, on the parameter."""
        kept = gradient if member.on_device else None
        # One that stays from then on must not have been rounded.
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

        If that is another backward, gradients wait for `step()` from now on.
        """
        is_shard = isinstance(member.param, DTensor)
        if is_shard and not (self.measures and (member.on_device or self.adds_shards)):
            raise checks.first_gradient_has_left(member)
        stand_in = member.placeholder
        assert isinstance(stand_in, GradientStandIn)
        gradient = torch.empty_like(member.param_local, memory_format=torch.preserve_format)
        flat = member.flat(gradient)
        self._shares.bring_back(member, flat)
        for factor in stand_in.factors:
            flat[member.on_device :].mul_(factor)
        if stand_in.kept_part is not None:
            flat[: member.on_device].copy_(stand_in.kept_part)
        self._shares.discard([member])
        if by_backward and self._sums_stay and not (self._are_accumulated or is_shard):
            self._are_accumulated = True
            checks.warn_accumulated()
        return gradient

    def to_use(self, member: Member) -> torch.Tensor | None:
        """Return a member's gradient, laid out; of one that has been sent off the part that the device has kept.

        One that has to go to the host and is still here is sent off.
        """
        found = member.gradient
        if isinstance(found, GradientStandIn):
            if found.dropped:
                found = found.in_its_place(member.param_local)
                member.put(found)
            elif found is not member.placeholder:
                raise checks.used_twice(member)
            else:
                return found.kept
        # It was dropped, or replaced by another one, or sent off by a step that failed before it began.
        self._shares.discard([member])
        if found is None:
            return None
        if not member.pieces:
            return gradient_of(member)
        gradient = self._shares.offload(member, measure=self.measures)
        member.placeholder = found
        return gradient

    def check_used_stand(self, members: Iterable[Member]) -> None:
        """Raise RuntimeError where the gradient of one of `members`, whose update has begun, was dropped or replaced.

        Stand-ins are put there again: the step goes on with the gradients of backward.
        """
        changed = [member for member in members if not _has_stand_in(member)]
        for member in changed:
            member.put(GradientStandIn(member.param_local, None, used=True, remedy=self._remedy))
        if changed:
            raise checks.used_is_replaced(changed[0].param)

    @staticmethod
    def real_ones(members: Iterable[Member]) -> list[Member]:
        """Return those of `members` whose new weight nobody waits for, and whose gradient itself stands on them."""
        return [m for m in members if m.pending and not isinstance(m.gradient, GradientStandIn | None)]

    @staticmethod
    def used_by_nobody(members: Iterable[Member]) -> list[Member]:
        """Return those of `members` that have a gradient and whose new weight nobody waited for, since none used it.

        The gradient is zeros, since somebody has set the last one to zero, or the weight only visits the device for its
        uses.
        """
        found = []
        for member in members:
            if member.pending:
                stands = member.gradient
                zeroed = isinstance(stands, GradientStandIn) and stands.dropped and stands.arrived is None
                if stands is not None and (zeroed or member.home is not None):
                    found.append(member)
        return found

    def stand_ins(
        self,
        arrivals: Mapping[Member, Event],
        gradients: Mapping[Member, torch.Tensor],
        *,
        begun: Iterable[Member] = (),
        returns_early: bool,
    ) -> dict[Member, GradientStandIn]:
        """Return the stand-ins that are on parameters from the begin of the step on: the update reads their gradients.

        Of `begun` members, whose update has begun in backward, a stand-in that somebody has replaced stays away.
        """
        placed = ((member, unwrapped(member.param.grad)) for member in begun)
        found = {member: stands for member, stands in placed if isinstance(stands, GradientStandIn)}
        for member in (*arrivals, *(member for member in gradients if not member.pieces)):
            now = unwrapped(member.param.grad)
            if isinstance(now, GradientStandIn):
                found[member] = now
            elif returns_early and now is not None and _may_be_replaced(member):
                # Whoever writes into a gradient later does not know that the update still reads it.
                found[member] = GradientStandIn(now, None, remedy=self._remedy)
        return found

    def norms(
        self, sent: Mapping[Member, Event], gradients: Mapping[Member, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the fp32 norms of all gradients, as they are now."""
        norms = []
        for member in sent:
            stand_in, norm = member.placeholder, self._shares.norms.get(member)
            if isinstance(stand_in, GradientStandIn):
                norm = None if stand_in.l2_norm is None else stand_in.scaled_norm()
            if norm is not None:
                norms.append(norm)
        return norms + norms_of(each for member, each in gradients.items() if not member.pieces)


def _has_stand_in(member: Member) -> bool:
    stands = member.gradient
    return isinstance(stands, GradientStandIn) and not stands.dropped


def _own_memory(member: Member) -> None:
    """Copy a gradient whose memory another tensor has too, as where `a + b` is used: both may have one gradient."""
    gradient = member.param.grad
    if gradient is None or isinstance(gradient, GradientStandIn) or gradient.layout != torch.strided:
        return
    storage = gradient.untyped_storage()
    shared = torch._C._storage_Use_Count(storage._cdata) > _USES_OF_ONE_TENSOR
    # Slices of one buffer do not overlap.
    if shared and storage.nbytes() == gradient.nbytes:
        member.param.grad = gradient.clone()


def _may_be_replaced(member: Member) -> bool:
    read_later = bool(member.pieces) or member.streamed > 0
    return read_later and member.gradient is member.param.grad and not isinstance(member.param, DTensor)


def factors_of(members: Iterable[Member]) -> tuple[list[torch.Tensor | float], dict[Member, list[int]]]:
    """Return all that gradients of `members` have been multiplied by, and for each member which of it, in order."""
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


def standing_on(members: Iterable[Member]) -> dict[Member, torch.Tensor]:
    """Return the gradients of those of `members` that have one."""
    return {member: gradient for member in members if (gradient := member.gradient) is not None}


def version_of(gradient: torch.Tensor) -> int:
    """Return a number that changes when a gradient is written in place."""
    return 0 if gradient.is_inference() else gradient._version


def _writes_of(gradient: torch.Tensor) -> int:
    # A stand-in says itself that it was dropped, and answers other questions slowly.
    return 0 if isinstance(gradient, GradientStandIn) else version_of(gradient)


class UsedGradients:
    """The gradients that the last step was taken from, as far as they still stand on parameters."""

    def __init__(self) -> None:
        # Weak, so that a gradient's memory is free once it is dropped.
        self._used: dict[Member, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._left_unseen = False

    def note(self, standing: Mapping[Member, torch.Tensor], *, left_unseen: bool) -> None:
        """Note that a step uses all that is `standing`, and gradients that left unseen; all or nothing."""
        used = {
            member: (weakref.ref(itself(gradient)), _writes_of(itself(gradient)))
            for member, gradient in standing.items()
        }
        self._used, self._left_unseen = used, left_unseen

    def forget(self) -> None:
        """Note that gradients were dropped, or that new ones come."""
        self._used, self._left_unseen = {}, False

    def are_all(self, members: Iterable[Member]) -> bool:
        """Return whether no other gradients stand on parameters, and these do unless they could not."""
        if not self._used and not self._left_unseen:
            return False
        standing = standing_on(members)
        return (bool(standing) or self._left_unseen) and all(map(self._is_used, standing, standing.values()))

    def _is_used(self, member: Member, gradient: torch.Tensor) -> bool:
        gradient = itself(gradient)
        used, version = self._used.get(member, (None, 0))
        if used is None or used() is not gradient or version != _writes_of(gradient):
            return False
        return not (isinstance(gradient, GradientStandIn) and gradient.dropped)


class AskedGradients:
    """The gradients of `members` when `step()` asks for the rest of an update that backward has begun.

    The rest is of these gradients, however often it fails, and whatever stands on the parameters then.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)
        standing = ((member.param, member.param.grad) for member in self._members)
        self._asked = [
            (param, gradient, _writes_of(gradient)) for param, gradient in standing if gradient is not None
        ]
        self._held_back: list[Member] = []

    def use(self, take: Callable[[], None], *, is_taken: Callable[[], bool]) -> None:
        """Call `take` while these gradients stand on their parameters; put back later ones afterwards.

        Until it `is_taken`, whoever reads a weight of `members` waits for it. Raises WorkLostError where somebody has
        written one of the gradients.
        """
        try:
            for member in self._held_back:
                member.pending = False
            self._held_back = [member for member in self._members if not member.pending]
            self._use(take)
        finally:
            if not is_taken():
                for member in self._held_back:
                    member.pending = True

    def _use(self, take: Callable[[], None]) -> None:
        for param, gradient, writes in self._asked:
            stands = unwrapped(gradient)
            is_dropped = isinstance(stands, GradientStandIn) and stands.dropped
            if is_dropped or _writes_of(gradient) != writes:
                raise WorkLostError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} was written after step() had raised, "
                    "and before the update that backward had begun was done; expected it to stay until the optimizer "
                    "has gone on; try loading the last checkpoint into a new optimizer"
                )
        replaced = [
            (param, gradient, param.grad) for param, gradient, _ in self._asked if param.grad is not gradient
        ]
        now = [(param, stands) for param, _, stands in replaced]
        try:
            try:
                _put_on((param, gradient) for param, gradient, _ in replaced)
                take()
            finally:
                _put_on(now)
        finally:
            # An interrupt may have come before the same line above.
            _put_on(now)


def _put_on(gradients: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for param, gradient in gradients:
        param.grad = gradient


def put_in_place(stand_ins: Mapping[Member, GradientStandIn]) -> None:
    """Put stand-ins on parameters; the step owns the gradients from here on."""
    for member, stand_in in stand_ins.items():
        stand_in.use()
        if unwrapped(member.param.grad) is not stand_in:
            member.put(stand_in)
