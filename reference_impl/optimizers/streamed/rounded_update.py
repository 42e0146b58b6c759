"""The update of states whose moments are kept in bf16: one kernel a piece unpacks, updates, rounds and packs.

Such moments are not torch's to the bit anyway, so the formula is our own (`formulas`), and nothing has to stand in fp32
on the device: 18 to 24 bytes an element pass through its memory, where torch's kernel between `packing.unpack` and
`packing.pack` would need 86. On CUDA `torch.compile` builds the kernel; the twin runs the same source block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Algorithm
from reference_impl.optimizers.formulas import Formula, Tensors
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.packing import (
    aligned_rows,
    apart,
    blocks,
    compiled,
    join,
    narrow,
    noise,
    split,
    widen,
    with_flag,
)


class Operands(NamedTuple):
    """One piece, all of one length: weights and states that are written, and the gradient.

    `low` are lower halves of masters (int16) beside bf16 weights (as int16), `master` whole ones beside weights of any
    dtype; an fp32 weight is its own `master` and is given as that alone. `moments` are the bits of bf16 (int16).
    """

    weight: torch.Tensor | None
    low: torch.Tensor | None
    master: torch.Tensor | None
    gradient: torch.Tensor
    moments: Tensors

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Operands:
        """Return the same with every tensor changed."""
        weight, low, master = (None if one is None else change(one) for one in self[:3])
        return Operands(weight, low, master, change(self.gradient), [change(one) for one in self.moments])


class Scalars(NamedTuple):
    """What all elements of a piece share, all on the device.

    `first` (0-dim int64) numbers the first element and `step` (0-dim) the step, for the noise; `numbers` is the row of
    the formula; gradients are divided by `grad_scale`, and nothing changes where `found_inf` is not 0.
    """

    first: torch.Tensor
    step: torch.Tensor
    numbers: torch.Tensor
    grad_scale: torch.Tensor
    found_inf: torch.Tensor


def update_halved(formula: Formula, operands: Operands, scalars: Scalars) -> None:
    """Update masters that are a weight and a lower half; the flag in the last moment's sign tells ties apart."""
    weight, low, _, _, moments = operands
    assert weight is not None
    assert low is not None
    old = join(weight, low, moments[-1] < 0).view(torch.float32)
    bits = [*(widen(each, flagged=False) for each in moments[:-1]), widen(moments[-1], flagged=True)]
    master, *rounded = _new_states(formula, operands, scalars, old, bits)
    high, lower, flag = split(master.view(torch.int32))
    weight.copy_(high)
    low.copy_(lower)
    for target, value in zip(moments[:-1], rounded[:-1], strict=True):
        target.copy_(value)
    moments[-1].copy_(with_flag(rounded[-1], flag))


def update_whole(formula: Formula, operands: Operands, scalars: Scalars) -> None:
    """Update masters that travel whole or stay, and round them to weights where these are something else."""
    weight, _, old, _, moments = operands
    assert old is not None
    bits = [widen(each, flagged=False) for each in moments]
    master, *rounded = _new_states(formula, operands, scalars, old, bits)
    old.copy_(master)
    if weight is not None:
        weight.copy_(master)
    for target, value in zip(moments, rounded, strict=True):
        target.copy_(value)


def _new_states(
    formula: Formula, operands: Operands, scalars: Scalars, master: torch.Tensor, bits: Tensors
) -> Tensors:
    """Return the new master in fp32 and the bits of the new moments, rounded to bf16."""
    before = [master, *(each.view(torch.float32) for each in bits)]
    gradient = operands.gradient.float() / scalars.grad_scale
    after = formula(master, gradient, before[1:], scalars.numbers)
    skipped = scalars.found_inf != 0
    master, *moments = (torch.where(skipped, was, now) for was, now in zip(before, after, strict=True))
    random = noise(master.numel(), scalars.first, scalars.step)
    return [
        master,
        *(narrow(each.view(torch.int32), part) for each, part in zip(moments, random, strict=False)),
    ]


class RoundedUpdate:
    """Runs the kernel; its methods queue on the live current stream."""

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        """Take two numbers of the device, for steps without a verdict."""
        self._device = device
        self._algorithm = algorithm
        self._one = torch.ones((), device=device.torch_device)
        self._zero = torch.zeros((), device=device.torch_device)

    def numbers(
        self,
        members: Sequence[Member],
        steps: Mapping[Member, torch.Tensor],
        groups: Sequence[Mapping[str, object]],
    ) -> dict[Member, torch.Tensor]:
        """Return each member's row for the formula: its group's hyper-parameters at its step."""
        found: dict[Member, torch.Tensor] = {}
        for group, alike in groupby(sorted(members, key=_group), key=_group):
            listed = list(alike)
            counted = torch.stack([steps[member] for member in listed])
            table = self._algorithm.numbers_by_step(groups[group], counted)
            found.update(zip(listed, aligned_rows(table), strict=True))
        return found

    def update(
        self,
        operands: Operands,
        *,
        first: torch.Tensor,
        step: torch.Tensor,
        numbers: torch.Tensor,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Update one piece, see `Operands` and `Scalars`."""
        function = update_whole if operands.low is None else update_halved
        scalars = Scalars(
            first,
            step,
            numbers,
            self._one if grad_scale is None else grad_scale,
            self._zero if found_inf is None else found_inf,
        )
        if self._device.is_cuda:
            compiled(function)(self._algorithm.formula, operands.each(apart), scalars)
            return
        for part in blocks(operands.gradient.numel()):
            cut = operands.each(lambda tensor, part=part: tensor[part])  # type: ignore[misc]
            function(self._algorithm.formula, cut, scalars._replace(first=first + part.start))


def _group(member: Member) -> int:
    return member.group
