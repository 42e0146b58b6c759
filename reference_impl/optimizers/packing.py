"""States that travel in fewer bytes: masters as the lower half of their weights, moments in bf16.

Everything is integer arithmetic on the bits of floats, so one source gives the same bits eagerly and compiled.

A bf16 weight is the upper half of its fp32 master, rounded to nearest even. So the master is the weight and the
master's lower 16 bits, where the weight tells whether rounding went up, except at a tie: 0x3F7F8000 and 0x3F808000
both round to 0x3F80. One more bit says "lower half of 0x8000 or more, and not rounded up"; it stands in the sign of
`exp_avg_sq`, which is never negative. A master that is NaN gives its weight the upper half as it is, so that all its
bits survive; a NaN whose payload stands only in the lower half therefore shows as infinity in the weight.

bf16 moments are rounded stochastically: 1 - beta2 is 0.001, less than half of what bf16 resolves (2**-8), so rounding
to nearest would leave `exp_avg_sq` where it is. The noise is a hash of element, step and state: the same in every
run, without a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

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
    """bf16 weights and lower halves (both int16), and the fp32 masters (as int32) that they make."""

    high: torch.Tensor
    low: torch.Tensor
    masters: torch.Tensor


def unpack(halves: Halves | None, stored: Tensors, wide: Tensors) -> None:
    """Write masters and moments in fp32 (as int32) from what has come in.

    With `halves` the last of `stored` is `exp_avg_sq` with the flags.
    """
    if halves is not None:
        halves.masters.copy_(join(halves.high, halves.low, stored[-1] < 0))
    for index, (source, target) in enumerate(zip(stored, wide, strict=True)):
        target.copy_(widen(source, flagged=halves is not None and index == len(stored) - 1))


def pack(
    halves: Halves | None, stored: Tensors, wide: Tensors, first: torch.Tensor, step: torch.Tensor
) -> None:
    """Write what goes out, and new weights, from masters and moments in fp32 (as int32).

    `first` (0-dim int64) numbers the first element and `step` (0-dim) the step, for the noise.
    """
    flag = None
    if halves is not None:
        high, low, flag = split(halves.masters)
        halves.high.copy_(high)
        halves.low.copy_(low)
    for index, (target, source) in enumerate(zip(stored, wide, strict=True)):
        value = source
        if target.dtype == torch.int16:
            value = narrow(source, _noise(source, first, step, index))
        if flag is not None and index == len(stored) - 1:
            value = with_flag(value, flag)
        target.copy_(value)


def _noise(like: torch.Tensor, first: torch.Tensor, step: torch.Tensor, salt: int) -> torch.Tensor:
    """Return 16 random bits (int32) for each element of `like`."""
    place = (torch.arange(like.numel(), device=like.device) + first) & 0xFFFFFFFF
    key = _mix(step.to(torch.int64) * 8 + salt + 1)
    return (_mix(place ^ key) & 0xFFFF).to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32 bits, held in int64 so that no product overflows."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def unpack_on(device: Device, halves: Halves | None, stored: Tensors, wide: Tensors) -> None:
    """Run `unpack` as one kernel on CUDA, block by block on the twin."""
    if device.is_cuda:
        _compiled(unpack)(_apart(halves), [apart(each) for each in stored], wide)
        return
    for part in _blocks(stored[0].numel()):
        unpack(_cut(halves, part), [each[part] for each in stored], [each[part] for each in wide])


def pack_on(
    device: Device,
    halves: Halves | None,
    stored: Tensors,
    wide: Tensors,
    first: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Run `pack` as one kernel on CUDA, block by block on the twin."""
    if device.is_cuda:
        _compiled(pack)(_apart(halves), [apart(each) for each in stored], wide, first, step)
        return
    for part in _blocks(stored[0].numel()):
        cut = [each[part] for each in stored], [each[part] for each in wide]
        pack(_cut(halves, part), *cut, first + part.start, step)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own.

    The compiler would take states in one buffer for aliases of each other, and copy them.
    """
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one kernel for all sizes, built at its first call."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def _blocks(numel: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, numel)) for start in range(0, numel, _BLOCK)]


def _cut(halves: Halves | None, part: slice) -> Halves | None:
    return halves and Halves(*(each[part] for each in halves))


def _apart(halves: Halves | None) -> Halves | None:
    return halves and halves._replace(low=apart(halves.low))
