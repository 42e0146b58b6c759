# SPDX-License-Identifier: Apache-2.0
"""The division of elements: resident, streamed or updated on the CPU, and the shares' plain data of a parameter.

Explained in docs/optimizer-offloading.md.

`offload_arithmetic.division` divides elements between the shares. Parameters with a common reduction of gradients
(FSDP2) go to one share together: their gradients lie in one buffer, freed with the last of them. The tensors behind
it are `cpu.buckets` and `streamed.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from offload_arithmetic.division import alternate, offload_last, offload_last_units
from offload_arithmetic.states import ALIGNMENT_ELEMENTS
from reference_impl.device import REACHED, Event
from reference_impl.distributed.matrix_owners import Cut, cut_of
from reference_impl.distributed.mesh import local_of, shard_like
from reference_impl.memory.absent import is_absent
from reference_impl.memory.weight_home import WeightHome
from reference_impl.optimizers.algorithms import MatrixAlgorithm
from reference_impl.optimizers.gradients.stand_in import unwrapped
from reference_impl.optimizers.writes.awaited import has_arrived

# The names that a state_dict has beside the algorithm's moments.
MASTER = "master_param"
STEP = "step"


@dataclass(eq=False, slots=True)
class Member:
    """One parameter: elements `[0, resident)` stay, the next `streamed` stream, the CPU updates the rest.

    `order` is its place in the forward. The rest is its state between steps. An offloaded gradient for the next step
    has the event of its copy (`arrival`) and its stand-in on the parameter (`placeholder`). A new weight has the event
    of its copy back (`published`, `pending` until someone has waited for it). `is_compiled`: compiled code has read it
    since the last step, so its order is not known. `loaded_version` is the weight's version at the load of a master
    that rounds to it: until it changes, they belong together. `is_apart`: the weight was not set at the load, as a
    parked one, and follows the master. `watched` is the weight as autograd counts its writes, at `version` and
    `address` when its master was the same; None if only the optimizer can write it. `home` belongs to a weight that
    only visits the device. `matrices` is the formula of its whole matrices, on the device alone; None for the
    optimizer's formula of elements. `cut` divides each of its matrices among ranks, None for whole ones. The states
    of a cut one `stay` on the device on all ranks, or stream on all of them, even if a rank has no element of it.
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
    is_apart: bool = False
    watched: torch.Tensor | None = None
    version: int = 0
    address: int = 0
    home: WeightHome | None = None
    matrices: MatrixAlgorithm | None = None
    stays: bool = False
    cut: Cut | None = field(init=False)

    def __post_init__(self) -> None:
        """Remember the layout of masters and moments, and the dtype: an fp32 weight is its own master."""
        self.cut = None if self.matrices is None else cut_of(self.param)
        self.stride = self.param_local.stride()
        self.dtype = self.param.dtype
        self.note_weight()

    def note_weight(self) -> None:
        """Take note that the master equals the weight now."""
        self.is_apart = False
        local = self.param_local
        if self.home is not None or is_absent(local) or local.is_inference():
            self.watched = None
        else:
            self.watched, self.version, self.address = local, local._version, local.data_ptr()

    def has_arrived(self) -> None:
        """Note that the new weight has been waited for."""
        self.pending = False
        has_arrived(self.param)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the next update: `decoupled_grad` where Megatron has put one on the parameter, else `grad`.

        Of a shard that has been offloaded it is the stand-in itself.
        """
        return unwrapped(getattr(self.param, "decoupled_grad", self.param.grad))

    def put(self, gradient: torch.Tensor) -> None:
        """Let `gradient`, of the shape of this rank's own tensor, stand on the parameter."""
        self.param.grad = shard_like(self.param, gradient)

    @property
    def unit(self) -> int:
        """Elements of one uncut unit: a whole matrix. Matrices of a stack lie one behind the other.

        For a matrix shared by ranks it is the longest shard, on each of them: they make the same chunks.
        """
        if self.matrices is None:
            return 1
        if self.cut is not None:
            return self.cut.longest_shard
        local = self.param_local
        matrix = local[0].numel() if local.dim() == 3 and len(local) else local.numel()
        is_stack = local.dim() == 3 and self.stride[0] == matrix and matrix % ALIGNMENT_ELEMENTS == 0
        return matrix if is_stack else local.numel()

    @property
    def matrix_numel(self) -> int:
        """Elements of each of its matrices that this rank has."""
        return max(self.param_local.shape[-2:].numel(), 1)

    def matrices_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices of `flat`, or the shards of shared ones, with the strides of the parameter."""
        shape = self.param_local.shape
        if self.cut is not None and len(shape) == 3:
            return list(flat.as_strided(shape, self.stride).unbind())
        if len(shape) == 2:
            return [flat.as_strided(shape, self.stride)]
        matrix = shape[1] * shape[2]
        return list(flat.as_strided((flat.numel() // matrix, *shape[1:]), self.stride).unbind())

    @property
    def on_device(self) -> int:
        """Elements updated on the device. Their gradient stays until the update."""
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

        Autograd does not count writes to it: counted writes are other code's, see `module_load`.
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
    check_kept(member)
    local = member.param_local
    if gradient.stride() != local.stride():
        gradient = torch.empty_like(local, dtype=gradient.dtype).copy_(gradient)
    return gradient


def check_kept(member: Member) -> None:
    """Raise RuntimeError where a parameter has changed its layout or dtype."""
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


def members_of(
    params: Iterable[tuple[torch.Tensor, int]],
    *,
    first_order: int,
    fraction: float,
    offload: Callable[[torch.Tensor], bool] | None,
    streamed: float = 0.0,
    ahead: int = 0,
    reductions: Mapping[torch.Tensor, object] | None = None,
    matrices: Sequence[MatrixAlgorithm | None] = (),
) -> list[Member]:
    """Split `params` (each with its group, in forward order) into resident and offloaded elements.

    `offload` decides whole parameters; without it the last `fraction` of all elements is offloaded. The share
    `streamed` of these streams, the CPU updates the rest. The first `ahead` elements stream, because they come in
    before the update: that is how long a start the CPU has on the forward. `reductions` has the reduction of each
    parameter reduced together with others. `matrices` has the formula of each group that updates matrices: of these the
    last `fraction` is offloaded, too, in whole ones, and all of it streams. Matrices shared by ranks are divided
    separately, by numbers known to every rank.
    """
    members = [
        Member(
            param,
            group,
            first_order + index,
            resident=local_numel(param),
            matrices=matrices[group] if matrices else None,
        )
        for index, (param, group) in enumerate(params)
    ]
    elements = [member for member in members if member.matrices is None]
    shared = [member for member in members if member.cut is not None]
    whole = [member for member in members if member.matrices is not None and member.cut is None]
    for member in shared:
        member.resident = member.unit
    if offload is not None:
        for member in members:
            if offload(member.param):
                member.resident = 0
    else:
        for alike, leave in (
            (elements, offload_last),
            (whole, offload_last_units),
            (shared, offload_last_units),
        ):
            leave(alike, round(fraction * sum(member.resident for member in alike)))
    for member in shared:
        member.stays = member.resident > 0
        member.resident = local_numel(member.param) if member.stays else 0
    for member in (*whole, *shared):
        member.streamed = member.on_cpu
    alternate(_units(elements, reductions or {}), streamed, ahead)
    return members


def _units(members: Iterable[Member], reductions: Mapping[torch.Tensor, object]) -> list[list[Member]]:
    """Return the groups of offloaded members that nothing splits, in the order of their first ones."""
    units: dict[object, list[Member]] = {}
    for member in members:
        if member.on_cpu:
            units.setdefault(reductions.get(member.param, member), []).append(member)
    return list(units.values())
