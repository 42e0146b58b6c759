"""States that travel in fewer bytes: masters as the lower half of their weights, moments in bf16.

Everything is integer arithmetic on the bits of floats, so one source gives the same bits eagerly and compiled.

A bf16 weight is the upper half of its fp32 master, rounded to nearest even. So the master is the weight and the
master's lower 16 bits, where the weight tells whether rounding went up, except at a tie: 0x3F7F8000 and 0x3F808000
both round to 0x3F80. One more bit says "lower half of 0x8000 or more, and not rounded up"; it stands in the sign of
`exp_avg_sq`, which is never negative. A master that is NaN gives its weight the upper half as it is, so that all its
bits survive; a NaN whose payload stands only in the lower half therefore shows as infinity in the weight.

bf16 moments (`rounded_update`) are rounded stochastically: 1 - beta2 is 0.001, less than half of what bf16 resolves
(2**-8), so rounding to nearest would leave `exp_avg_sq` where it is. The noise is a hash of element and step: the same
in every run, without a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from reference_impl.device import Device

# The state that holds lower halves of masters.
LOW = "master_low"

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(2**31)
_LARGEST_BF16 = 0x7F7F
_QUIET_BF16 = 0x40
# Eager temporaries are of this many elements at most.
_BLOCK = 2**16

Tensors = Sequence[torch.Tensor]


def join(high: torch.Tensor, low: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    """Return the bits (int32) of masters from bf16 weights, lower halves (both int16) and flags (bool)."""
    rounded_up = (low < 0) & ~flag
    upper = high.to(torch.int32) - rounded_up.to(torch.int32)
    return (upper << 16) | (low.to(torch.int32) & 0xFFFF)


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
    """Return the fp32 bits (int32) of a moment stored as int16 (bf16) or int32, less the flag in its sign."""
    bits = stored.to(torch.int32)
    if stored.dtype == torch.int16:
        bits = bits << 16
    return bits & _MAGNITUDE if flagged else bits


def narrow(bits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 bits (int32) to bf16 bits (int16), up with the probability of what is cut off.

    `noise` is uniform in [0, 2**16). A value that bf16 holds stays, a finite one stays finite, NaN stays NaN.
    """
    magnitude = bits & _MAGNITUDE
    finite = magnitude < _INFINITY
    rounded = torch.clamp((magnitude + torch.where(finite, noise, 0)) >> 16, max=_LARGEST_BF16)
    special = (magnitude >> 16) | torch.where(magnitude > _INFINITY, _QUIET_BF16, 0)
    result = torch.where(finite, rounded, special)
    return torch.where(bits < 0, result - 0x8000, result).to(torch.int16)


def with_flag(stored: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    """Return `stored` (int16 or int32) with its sign replaced by `flag`."""
    if stored.dtype == torch.int16:
        magnitude = stored.to(torch.int32) & 0x7FFF
        return torch.where(flag, magnitude - 0x8000, magnitude).to(torch.int16)
    magnitude = stored & _MAGNITUDE
    return torch.where(flag, magnitude | _SIGN, magnitude)


def integers(stored: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 or bf16 values, as int32 or int16 in the same memory."""
    return stored.view(torch.int16 if stored.dtype == torch.bfloat16 else torch.int32)


class Halves(NamedTuple):
    """bf16 weights and lower halves (both int16), the fp32 masters that they make, and `exp_avg_sq` (both int32)."""

    high: torch.Tensor
    low: torch.Tensor
    masters: torch.Tensor
    flagged: torch.Tensor


def unpack(halves: Halves) -> None:
    """Write the masters, and take the flags off `exp_avg_sq`."""
    halves.masters.copy_(join(halves.high, halves.low, halves.flagged < 0))
    halves.flagged.copy_(widen(halves.flagged, flagged=True))


def pack(halves: Halves) -> None:
    """Write new weights and lower halves from the masters, and put the flags on `exp_avg_sq`."""
    high, low, flag = split(halves.masters)
    halves.high.copy_(high)
    halves.low.copy_(low)
    halves.flagged.copy_(with_flag(halves.flagged, flag))


def noise(count: int, first: torch.Tensor, step: torch.Tensor) -> Tensors:
    """Return 16 random bits (int32) for each of `count` elements, for each of two moments.

    `first` (0-dim int64) numbers the first element and `step` (0-dim) the step.
    """
    place = torch.arange(count, dtype=torch.int32, device=first.device) + first.to(torch.int32)
    bits = _mix(place ^ _mix(step.to(torch.int32) + 1))
    return bits & 0xFFFF, _shifted(bits, 16)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int32, whose products wrap around: 64 bits would take the GPU twice as long."""
    x = (x ^ _shifted(x, 16)) * 0x21F0AAAD
    x = (x ^ _shifted(x, 15)) * 0x735A2D97
    return x ^ _shifted(x, 15)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right and bring zeros in; `>>` brings in the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def run_on(device: Device, function: Callable[[Halves], None], halves: Halves) -> None:
    """Run `pack` or `unpack` as one kernel on CUDA, block by block on the twin."""
    if device.is_cuda:
        compiled(function)(Halves(*map(apart, halves)))
        return
    for part in blocks(halves.low.numel()):
        function(Halves(*(each[part] for each in halves)))


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own.

    The compiler would take states in one buffer for aliases of each other, and copy them.
    """
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


def aligned_rows(table: torch.Tensor) -> Tensors:
    """Return the rows of `table` (2-dim), each at a multiple of 16 bytes; a compiled function copies others first."""
    width = table.shape[1]
    return pad(table, (0, -width % (16 // table.element_size())))[:, :width].unbind()


@cache
def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one kernel for all sizes, built at its first call."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def blocks(numel: int) -> list[slice]:
    """Return slices small enough for what eager arithmetic allocates on the way."""
    return [slice(start, min(start + _BLOCK, numel)) for start in range(0, numel, _BLOCK)]
