# SPDX-License-Identifier: Apache-2.0
"""States in fewer bits: the lower halves of masters beside bf16 weights, and moments in bf16 with their update.

Everything but the formulas is integer arithmetic on the bits of floats.

A bf16 weight is the upper half of its fp32 master, rounded to nearest even. So the master is the weight and the
master's lower 16 bits, where the weight tells whether rounding went up, except at a tie: 0x3F7F8000 and 0x3F808000
both round to 0x3F80. One more bit says "lower half of 0x8000 or more, and not rounded up"; it is stored in the sign
of `exp_avg_sq`, never negative itself, or in a field of bits if all moments have signs. A NaN master gives its weight
the unchanged upper half, so all its bits survive. A NaN with its payload in the lower half alone therefore shows as
infinity in the weight.

bf16 moments are rounded stochastically: 1 - beta2 is 0.001, less than half of bf16's resolution (2**-8), so rounding
to nearest would leave `exp_avg_sq` where it is. The noise is a hash of element and step: the same in every run, without
a generator's state. Such moments are not torch's to the bit anyway, so their update is our own formula
(`Algorithm.formula`). One kernel unpacks, updates, rounds and packs: 18 to 24 bytes an element pass through the GPU's
memory. Torch's kernel between `unpack` and `pack` would need 86.

On CUDA `rounded_kernel` has the kernel of bf16 moments, and `halves_kernel` the packing and unpacking beside fp32
moments. Both make the same bits; the CPU twin runs the source here block by block. There each operator may fail by
itself, so all new values of a block are computed before the first is written. Explained in
docs/optimizer-state-offloading.md, "Fewer bytes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from reference_impl.device import Device
from reference_impl.memory.ledger import unseen
from reference_impl.optimizers.algorithms import Algorithm, Formula, Numbers, group_defaults
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.step import StreamedStep

Tensors = Sequence[torch.Tensor]
# Pairs of a tensor and the source of a copy into it.
Writes = Sequence[tuple[torch.Tensor, torch.Tensor]]

# In a field of their own.
FLAGS_A_BYTE = 8
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)
_LARGEST_BF16 = 0x7F7F
_QUIET_BF16 = 0x40
# How far apart the first elements of parameters are numbered: the golden section spreads them evenly.
_NUMBERS_APART = 0x4F1BBCDD
# Eager temporaries are of this many elements at most.
_BLOCK = 2**16


def join(high: torch.Tensor, low: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    """Return the bits (int32) of masters from bf16 weights, lower halves (both int16) and flags (bool).

    No master is rounded up to zero: other code has written the weight, and its lower half is of the weight before.
    """
    rounded_up = (low < 0) & ~flag
    upper = high.to(torch.int32) - rounded_up.to(torch.int32)
    is_written = rounded_up & ((high & 0x7FFF) == 0)
    return torch.where(is_written, high.to(torch.int32) << 16, (upper << 16) | (low.to(torch.int32) & 0xFFFF))


def split(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bf16 weights, lower halves (both int16) and flags of masters given as int32; `join` undoes it."""
    lower, upper = bits & 0xFFFF, bits >> 16
    odd = (upper & 1) == 1
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    rounds_up = ((lower > 0x8000) | ((lower == 0x8000) & odd)) & ~is_nan
    flag = (lower >= 0x8000) & ~rounds_up
    high = upper + rounds_up.to(torch.int32)
    return high.to(torch.int16), (lower - ((lower & 0x8000) << 1)).to(torch.int16), flag


def widen(stored: torch.Tensor, *, flagged: bool) -> torch.Tensor:
    """Return the fp32 bits (int32) of a moment stored as int16 (bf16) or int32, without the flag in its sign."""
    bits = stored.to(torch.int32)
    if stored.dtype == torch.int16:
        bits = bits << 16
    return bits & _MAGNITUDE if flagged else bits


def narrow(bits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 bits (int32) to bf16 bits (int16), up with the probability of the part that is cut off.

    `noise` is uniform in [0, 2**16). A value that bf16 holds stays, a finite one stays finite, NaN stays NaN.
    """
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    rounded = torch.clamp((magnitude + torch.where(finite, noise, 0)) >> 16, max=_LARGEST_BF16)
    special = (magnitude >> 16) | torch.where(magnitude > _INFINITY, _QUIET_BF16, 0)
    result = torch.where(finite, rounded, special)
    return torch.where(bits < 0, result - 0x8000, result).to(torch.int16)


def with_flag(stored: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    """Return `stored` (int16 or int32) with its sign replaced by `flag`, or (uint8) with a bit for each flag."""
    if stored.dtype == torch.uint8:
        places = torch.arange(FLAGS_A_BYTE, dtype=torch.uint8, device=stored.device)
        return (flag.view(-1, FLAGS_A_BYTE).to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)
    if stored.dtype == torch.int16:
        magnitude = stored.to(torch.int32) & 0x7FFF
        return torch.where(flag, magnitude - 0x8000, magnitude).to(torch.int16)
    magnitude = stored & _MAGNITUDE
    return torch.where(flag, magnitude | _SIGN, magnitude)


def flags_of(stored: torch.Tensor) -> torch.Tensor:
    """Return the flags (bool) that `with_flag` has put into `stored`."""
    if stored.dtype != torch.uint8:
        return stored < 0
    places = torch.arange(FLAGS_A_BYTE, dtype=torch.uint8, device=stored.device)
    return ((stored[:, None] >> places) & 1).flatten() != 0


def integers(stored: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 or bf16 values, as int32 or int16 in the same memory."""
    return stored.view(torch.int16 if stored.dtype == torch.bfloat16 else torch.int32)


class Halves(NamedTuple):
    """bf16 weights and lower halves (both int16), the fp32 masters that they make (int32), and the flags' holder.

    That is `exp_avg_sq` (int32), or an eighth as many bytes (uint8).
    """

    high: torch.Tensor
    low: torch.Tensor
    masters: torch.Tensor
    flagged: torch.Tensor


def _unpacked(halves: Halves) -> Writes:
    masters = join(halves.high, halves.low, flags_of(halves.flagged))
    if halves.flagged.dtype == torch.uint8:
        return [(halves.masters, masters)]
    return [(halves.masters, masters), (halves.flagged, widen(halves.flagged, flagged=True))]


def _packed(halves: Halves) -> Writes:
    high, low, flag = split(halves.masters)
    flagged = with_flag(halves.flagged, flag)
    return [(halves.high, high), (halves.low, low), (halves.flagged, flagged)]


def write(writes: Writes) -> None:
    """Copy each value into its tensor."""
    for target, value in writes:
        target.copy_(value)


def noise(count: int, first: torch.Tensor, step: torch.Tensor) -> Tensors:
    """Return 16 random bits (int32) for each of `count` elements, for each of two moments.

    `first` (0-dim int64) numbers the first element and `step` (0-dim) the step.
    """
    bits = random_bits(
        torch.arange(count, dtype=torch.int32, device=first.device) + first.to(torch.int32), step
    )
    return bits & 0xFFFF, _shifted(bits, 16)


class Rounding(NamedTuple):
    """A moment's new values (fp32 bits as int32), where they are stored in bf16 (int16), and their noise.

    `first` (0-dim int64) and `shift` number the first element, `step` (0-dim) the step; nothing is written where
    `skipped` (0-dim bool). `moment` is the place among the moments; two of them have noise of their own.
    """

    stored: torch.Tensor
    values: torch.Tensor
    first: torch.Tensor
    step: torch.Tensor
    skipped: torch.Tensor
    shift: int
    moment: int


def _rounded(rounding: Rounding, part: slice) -> Writes:
    stored, values = rounding.stored[part], rounding.values[part]
    random = noise(values.numel(), rounding.first + (rounding.shift + part.start), rounding.step)
    new = narrow(values, random[rounding.moment % 2])
    return [(stored, torch.where(rounding.skipped, stored, new))]


def number(order: int, element: int) -> int:
    """Number an element of the parameter that has the place `order`: the same however the parameter is cut."""
    return (order * _NUMBERS_APART + element) % 2**31


def random_bits(numbers: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits (int32) for each of the elements that have these `numbers` (int32)."""
    return _mix(numbers ^ _mix(step.to(torch.int32) + 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int32, whose products wrap around. With 64 bits the GPU would take twice as long."""
    x = (x ^ _shifted(x, 16)) * 0x21F0AAAD
    x = (x ^ _shifted(x, 15)) * 0x735A2D97
    return x ^ _shifted(x, 15)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; `>>` fills with the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def block_by_block(numel: int, part: Callable[[slice], Writes]) -> None:
    """Make the writes of every `part` of `numel` elements: in place of one kernel, where nothing compiles."""
    # A kernel has no temporaries.
    with unseen():
        for each in blocks(numel):
            write(part(each))


class Packer:
    """Packs and unpacks on the live current stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def unpack(self, halves: Halves) -> None:
        """Write the masters, and take the flags off `exp_avg_sq` if it holds them."""
        if self._device.compiles:
            self._device.launch(_on_gpu().unpack, halves)
        else:
            _in_blocks(_unpacked, halves)

    def pack(self, halves: Halves) -> None:
        """Write new weights and lower halves from the masters, and the flags."""
        if self._device.compiles:
            self._device.launch(_on_gpu().pack, halves)
        else:
            _in_blocks(_packed, halves)

    def round(self, rounding: Rounding) -> None:
        """Store a moment's new values in bf16, rounded stochastically."""
        if self._device.compiles:
            self._device.launch(_on_gpu().round_moment, rounding)
        else:
            block_by_block(rounding.values.numel(), lambda part: _rounded(rounding, part))


def _in_blocks(values: Callable[[Halves], Writes], halves: Halves) -> None:
    block_by_block(halves.low.numel(), lambda part: values(_of_elements(halves, part)))


def _of_elements(halves: Halves, part: slice) -> Halves:
    of_flags = part
    if halves.flagged.dtype == torch.uint8:
        of_flags = slice(part.start // FLAGS_A_BYTE, part.stop // FLAGS_A_BYTE)
    return Halves(halves.high[part], halves.low[part], halves.masters[part], halves.flagged[of_flags])


def _on_gpu() -> ModuleType:
    from reference_impl.optimizers.streamed import halves_kernel

    return halves_kernel


def aligned_rows(table: torch.Tensor) -> Tensors:
    """Return the rows of `table` (2-dim), each at a multiple of 16 bytes: for others Triton builds another kernel."""
    width = table.shape[1]
    return pad(table, (0, -width % (16 // table.element_size())))[:, :width].unbind()


def blocks(numel: int) -> list[slice]:
    """Return slices so short that the temporaries of eager arithmetic stay small."""
    return [slice(start, min(start + _BLOCK, numel)) for start in range(0, numel, _BLOCK)]


class PieceOperands(Protocol):
    """The tensors of one piece, and their update."""

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient, flat."""

    def part(self, elements: slice) -> PieceOperands:
        """Return the operands of some elements that begin at a multiple of `ALIGNMENT`."""

    def launch(self, formula: Formula, scalars: Scalars) -> None:
        """Run the GPU's kernel."""

    def writes(self, formula: Formula, scalars: Scalars) -> Writes:
        """Return the values that the update would write."""


class Operands(NamedTuple):
    """The tensors of one piece, all of one length: written weights and states, and the gradient.

    Either `low` holds the lower halves of masters (int16) beside bf16 `weight` (as int16), or `master` holds whole ones
    beside `weight` of any dtype. An fp32 weight is its own master, so `weight` is None. `moments` are the bits of bf16
    (int16).
    """

    weight: torch.Tensor | None
    low: torch.Tensor | None
    master: torch.Tensor | None
    gradient: torch.Tensor
    moments: Tensors

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Operands:
        """Return the operands with `change` applied to every tensor."""
        weight, low, master = (None if one is None else change(one) for one in self[:3])
        return Operands(weight, low, master, change(self.gradient), [change(one) for one in self.moments])

    def part(self, elements: slice) -> Operands:
        """Return the operands of some elements."""
        return self.each(lambda tensor: tensor[elements])

    def writes(self, formula: Formula, scalars: Scalars) -> Writes:
        """Return the values that the update would write."""
        function = _updated_whole if self.low is None else _updated_halved
        return function(formula, self, scalars)

    def launch(self, formula: Formula, scalars: Scalars) -> None:
        """Run the GPU's kernel."""
        from reference_impl.optimizers.streamed import rounded_kernel

        rounded_kernel.update(formula, self, scalars)


class Scalars(NamedTuple):
    """The numbers that all elements of a piece share, on the device.

    `first` (0-dim int64) numbers the first element and `step` (0-dim) the step, for the noise. `numbers` is the row of
    the formula. Gradients are divided by `grad_scale`, and nothing changes if `found_inf` is not 0.
    """

    first: torch.Tensor
    step: torch.Tensor
    numbers: Numbers
    grad_scale: torch.Tensor
    found_inf: torch.Tensor


def _updated_halved(formula: Formula, operands: Operands, scalars: Scalars) -> Writes:
    weight, low, _, _, moments = operands
    assert weight is not None
    assert low is not None
    old = join(weight, low, moments[-1] < 0).view(torch.float32)
    bits = [*(widen(each, flagged=False) for each in moments[:-1]), widen(moments[-1], flagged=True)]
    master, *rounded = _new_states(formula, operands, scalars, old, bits)
    high, lower, flag = split(master.view(torch.int32))
    flagged = with_flag(rounded[-1], flag)
    return [
        (weight, high),
        (low, lower),
        *zip(moments[:-1], rounded[:-1], strict=True),
        (moments[-1], flagged),
    ]


def _updated_whole(formula: Formula, operands: Operands, scalars: Scalars) -> Writes:
    weight, _, old, _, moments = operands
    assert old is not None
    bits = [widen(each, flagged=False) for each in moments]
    master, *rounded = _new_states(formula, operands, scalars, old, bits)
    weights = [] if weight is None else [(weight, master)]
    return [(old, master), *weights, *zip(moments, rounded, strict=True)]


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
    """Runs the update of rounded or compact moments, a kernel a piece, on the live current stream."""

    def __init__(self, device: Device, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._device = device
        # The scale and the overflow flag of steps that have none.
        self._one = torch.ones((), device=device.torch_device)
        self._zero = torch.zeros((), device=device.torch_device)

    def any_numbers(self) -> torch.Tensor:
        """Return a row of numbers in the form of `numbers`, from the defaults."""
        table = self._algorithm.numbers_by_step(group_defaults(self._algorithm), self._zero[None])
        return aligned_rows(table)[0]

    def numbers(self, members: Sequence[Member], step: StreamedStep) -> dict[Member, torch.Tensor]:
        """Return each member's row of numbers for the formula: its group's hyper-parameters at its step."""
        found: dict[Member, torch.Tensor] = {}
        for group, alike in groupby(sorted(members, key=_group), key=_group):
            listed = list(alike)
            table = self._algorithm.numbers_by_step(step.groups[group], step.counted(listed))
            found.update(zip(listed, aligned_rows(table), strict=True))
        return found

    def update(
        self,
        operands: PieceOperands,
        *,
        first: torch.Tensor,
        step: torch.Tensor,
        numbers: torch.Tensor,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Update one piece; its operands and `Scalars` have names."""
        scalars = Scalars(
            first,
            step,
            numbers,
            self._one if grad_scale is None else grad_scale,
            self._zero if found_inf is None else found_inf,
        )
        formula = self._algorithm.formula
        if self._device.compiles:
            self._device.launch(operands.launch, formula, scalars)
            return
        block_by_block(
            operands.gradient.numel(),
            lambda part: operands.part(part).writes(formula, scalars._replace(first=first + part.start)),
        )


def _group(member: Member) -> int:
    return member.group
