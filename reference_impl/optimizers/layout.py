"""Which elements are resident, streamed or updated on the CPU, and the plain data by which shares know a parameter.

Explained in docs/optimizer-offloading.md.

A share is a number of elements, exact to `ALIGNMENT`, because every element costs the same bytes: one parameter may
stay on the device in part. What the forward uses last is offloaded first: its gradient is final first in backward,
and its new weight is needed last in the next forward, so it has the most time to hide. Of the offloaded elements, as
many as can be prefetched before the update begins are streamed first. Then parameters alternate between the streamed
and the CPU share, so that both keep the forward's pace. Those whose gradients one reduction makes (FSDP2) go to one
share together: the memory of the gradients is one buffer, which is freed with the last of them. Pure arithmetic over
shapes; the tensors behind it are `cpu.buckets` and `streamed.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import REACHED, Event
from reference_impl.distributed.mesh import local_of, shard_like
from reference_impl.memory.absent import is_absent
from reference_impl.memory.weight_home import WeightHome
from reference_impl.optimizers.stand_in import unwrapped

# 64 elements are 256 bytes in fp32: cuts at multiples of it leave the SIMD body of the fused kernels, and so
# every bit of the result, as they are for the whole tensor.
ALIGNMENT = 64
# The names that a state_dict has beside the algorithm's moments.
MASTER = "master_param"
STEP = "step"


class Split(NamedTuple):
    """Shares of all state: on the device, streamed through it, and updated on the CPU; they sum to 1."""

    resident: float
    streamed: float
    cpu: float

    @property
    def streamed_of_offloaded(self) -> float:
        """The streamed share of what does not stay on the device."""
        return self.streamed / (self.streamed + self.cpu) if self.streamed else 0.0


@dataclass(eq=False, slots=True)
class Member:
    """One parameter: elements `[0, resident)` stay, the next `streamed` stream, the CPU updates the rest.

    `order` is its place in the forward. The rest is its state between steps: of a gradient that has been sent off for
    the next step the event of its copy (`arrival`) and what stands on the parameter for it (`placeholder`); of a new
    weight the event of its copy back (`published`, `pending` until someone has waited for it). `is_compiled` says that
    compiled code has read it since the last step, which does not tell of its order. `loaded_version` is the weight's
    where a master was loaded that rounds to it: until it changes, they belong together. `watched` is the weight as
    autograd counts its writes, at `version` and `address` when its master was the same; None where nobody can write it
    but the optimizer. `home` is where the weight lives that only visits the device.
    """

    param: torch.Tensor
    group: int
    order: int
    resident: int
    streamed: int = 0
    pieces: list[Piece] = field(default_factory=list)
    stride: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)
    step: torch.Tensor = field(default_factory=lambda: torch.tensor(0.0))
    arrival: Event | None = None
    placeholder: torch.Tensor | None = None
    published: Event = REACHED
    pending: bool = False
    is_compiled: bool = False
    loaded_version: int | None = None
    watched: torch.Tensor | None = None
    version: int = 0
    address: int = 0
    home: WeightHome | None = None

    def __post_init__(self) -> None:
        """Remember the layout that masters and moments are in, and the dtype that says who is its own master."""
        self.stride = self.param_local.stride()
        self.dtype = self.param.dtype
        self.note_weight()

    def note_weight(self) -> None:
        """Take note that the master is what the weight is now."""
        local = self.param_local
        if self.home is not None or is_absent(local) or local.is_inference():
            self.watched = None
        else:
            self.watched, self.version, self.address = local, local._version, local.data_ptr()

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the next update uses: `decoupled_grad` where Megatron has put one on the parameter, else `grad`.

        Of a shard that has been offloaded it is the stand-in itself.
        """
        return unwrapped(getattr(self.param, "decoupled_grad", self.param.grad))

    def put(self, gradient: torch.Tensor) -> None:
        """Let `gradient`, of the shape of this rank's own tensor, stand on the parameter."""
        self.param.grad = shard_like(self.param, gradient)

    @property
    def on_device(self) -> int:
        """Elements that the device updates, and whose gradient therefore stays until then."""
        return self.resident + self.streamed

    @property
    def on_cpu(self) -> int:
        """Elements that the CPU updates."""
        return self.param_local.numel() - self.on_device

    @property
    def param_local(self) -> torch.Tensor:
        """This rank's own tensor: the parameter, or a DTensor's local shard."""
        return local_of(self.param)

    @property
    def weight(self) -> torch.Tensor:
        """This rank's weight as it is, in its own shape: on the host where it lives there.

        Autograd does not count what is written to it: whatever it counts is somebody else's, see `module_load`.
        """
        if self.home is None:
            return self.param_local.data
        return self.home.host.as_strided(self.param_local.shape, self.stride)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of `tensor`, laid out like the parameter, as one dimension."""
        return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(eq=False, slots=True)
class Piece:
    """Elements `[start, stop)` of one member, at `offset` in its bucket."""

    member: Member
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start


class NewWeights(NamedTuple):
    """New weights on the device (`weights`) that go into `target`, part of the parameter, once `event` is reached."""

    target: torch.Tensor
    weights: torch.Tensor
    event: Event


def aligned(numel: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def local_numel(param: torch.Tensor) -> int:
    """Elements of a parameter on this rank."""
    return local_of(param).numel()


def gradient_of(member: Member) -> torch.Tensor:
    """Return a member's gradient on this rank, laid out in memory like the parameter.

    Raises RuntimeError for a sparse gradient, and when the parameter has changed its layout or dtype.
    """
    gradient = member.gradient
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(member.param.shape)} is sparse; expected a dense one; "
            "try sparse=False in the embedding"
        )
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    local = member.param_local
    if local.dtype != member.dtype:
        raise RuntimeError(
            f"a parameter of shape {tuple(local.shape)} has become {local.dtype}; expected {member.dtype}, which its "
            "masters and staging are made for; try model.to(dtype) before the optimizer is made"
        )
    if local.stride() != member.stride:
        raise RuntimeError(
            f"a parameter of shape {tuple(local.shape)} has strides {local.stride()}; expected {member.stride}, as "
            "its optimizer state; try changing the memory format before the optimizer is made"
        )
    if gradient.stride() != local.stride():
        gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
    return gradient


def members_of(
    params: Iterable[tuple[torch.Tensor, int]],
    *,
    first_order: int,
    fraction: float,
    offload: Callable[[torch.Tensor], bool] | None,
    streamed: float = 0.0,
    ahead: int = 0,
    reductions: Mapping[torch.Tensor, object] | None = None,
) -> list[Member]:
    """Split `params` (each with its group, in forward order) into resident and offloaded elements.

    `offload` decides whole parameters; without it the last `fraction` of all elements is offloaded. The share
    `streamed` of these streams, the CPU updates the rest. The first `ahead` elements stream, because they come in
    before the update: that is how long a start the CPU has on the forward. `reductions` are those of the parameters
    whose gradients are reduced with others.
    """
    listed = list(params)
    members = [
        Member(param, group, first_order + index, resident=local_numel(param))
        for index, (param, group) in enumerate(listed)
    ]
    if offload is not None:
        for member in members:
            if offload(member.param):
                member.resident = 0
    else:
        wanted = round(fraction * sum(local_numel(param) for param, _ in listed))
        for member in reversed(members):
            taken = min(wanted, member.resident)
            # Round the cut so that both parts start aligned; a whole parameter needs no rounding.
            member.resident = min(aligned(member.resident - taken), member.resident)
            wanted -= taken
    _alternate(_units(members, reductions or {}), streamed, ahead)
    return members


def _units(members: Iterable[Member], reductions: Mapping[torch.Tensor, object]) -> list[list[Member]]:
    """Return what is not to be split, of the members that are offloaded, in the order of the first ones."""
    units: dict[object, list[Member]] = {}
    for member in members:
        if member.on_cpu:
            units.setdefault(reductions.get(member.param, member), []).append(member)
    return list(units.values())


def _alternate(units: Sequence[Sequence[Member]], streamed: float, ahead: int) -> None:
    """Let whole units stream: the first `ahead` elements, then whenever the stream is behind the rest of its share.

    What is left over or missing then is moved: at most one unit is cut, and one member in it.
    """
    total = sum(member.on_cpu for unit in units for member in unit)
    wanted = streamed * total
    ahead = min(ahead, int(wanted))
    pace = (wanted - ahead) / max(total - ahead, 1)
    seen = taken = 0
    for unit in units:
        numel = _numel(unit)
        seen += numel
        due = min(seen, ahead) + pace * max(seen - ahead, 0)
        if due - taken >= numel / 2:
            taken += numel
            for member in unit:
                member.streamed = member.on_cpu
    _move(units, round(wanted - taken))


class _Moves(NamedTuple):
    """Units that change sides as wholes, and how many elements more stream of the one that is `cut` then."""

    whole: list[Sequence[Member]]
    missing: int
    cut: Sequence[Member]


def _move(units: Sequence[Sequence[Member]], missing: int) -> None:
    """Let `missing` more elements stream, or so many less if negative.

    The gradient of a member that is cut stays on the device as a whole, however much of it the CPU updates. So a small
    one is cut: the smallest that is large enough, or if that is large, it changes sides too, and others go back for it.
    """
    moves = _moves(units, missing)
    if moves.cut:
        others = [unit for unit in units if unit is not moves.cut]
        too_many = _numel(moves.cut) if missing > 0 else -_numel(moves.cut)
        back = _moves(others, moves.missing - too_many)
        if (back.cut or not back.missing) and _numel(back.cut) < _numel(moves.cut):
            moves = back._replace(whole=[*moves.whole, moves.cut, *back.whole])
    for member in (member for unit in moves.whole for member in unit):
        member.streamed = 0 if member.streamed else member.on_cpu
    missing = moves.missing
    for member in reversed(moves.cut):
        numel = member.streamed + member.on_cpu
        moved = max(min(missing, member.on_cpu), -member.streamed)
        missing -= moved
        member.streamed = min(aligned(member.streamed + moved), numel)


def _moves(units: Sequence[Sequence[Member]], missing: int) -> _Moves:
    """Return how `missing` more elements stream: by the largest units that fit, and the smallest one to be cut."""
    streams = missing < 0
    # The last first, of those that are as large.
    movable = sorted(
        (unit for unit in reversed(units) if _streams(unit) == streams), key=_numel, reverse=True
    )
    whole: list[Sequence[Member]] = []
    cut: Sequence[Member] = ()
    for unit in movable:
        if _numel(unit) > abs(missing):
            cut = unit
        else:
            whole.append(unit)
            missing += _numel(unit) if streams else -_numel(unit)
    return _Moves(whole, missing, cut if missing else ())


def _numel(unit: Sequence[Member]) -> int:
    """Elements of a unit that are offloaded."""
    return sum(member.streamed + member.on_cpu for member in unit)


def _streams(unit: Sequence[Member]) -> bool:
    return any(member.streamed for member in unit)
