# SPDX-License-Identifier: Apache-2.0
"""Bytes of an element's optimizer states, at rest and on the link, by their streamed form.

An fp32 parameter is its own master, so that its moments alone stream. The forms have the names of `reference_impl`'s
`Streaming`, explained in docs/optimizer-state-offloading.md.
"""

from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT_ELEMENTS = 64  # of cuts: 256 bytes in fp32, so that vectorised kernels give the same bits as uncut
COMPACT_BLOCK_ELEMENTS = 64  # that share one scale of 2 bytes for each moment
BF16_BYTES, FP32_BYTES = 2, 4
ADAM_BYTES = 12  # an fp32 master and two fp32 moments
ADAM_MOMENTS, MUON_MOMENTS = 2, 1
_FLAG_BYTES = (
    1 / 8
)  # of a half master: how it was rounded; Adam's `exp_avg_sq` has its sign to spare for that


class Form(NamedTuple):
    """Bytes of a streamed element: of a bf16 parameter's master beside the weight, and of each moment."""

    master_bytes: float = FP32_BYTES
    moment_bytes: float = FP32_BYTES
    is_compact: bool = False

    def bytes(self, moments: int, *, is_own_master: bool) -> float:
        """Return the bytes on the link each way for one element with a free sign in its moments."""
        return self.moment_bytes * moments + (0 if is_own_master else self.master_bytes)

    def signed_bytes(self, moments: int, *, is_own_master: bool) -> float:
        """Return the same where all moments have signs, so that flags of half masters stand beside them."""
        is_half = self.master_bytes < FP32_BYTES and not self.is_compact and not is_own_master
        return self.bytes(moments, is_own_master=is_own_master) + is_half * _FLAG_BYTES


WHOLE = Form()  # all in fp32


def form(*, hi_lo_masters: bool, moment_bytes: float, compact_low_bits: int | None) -> Form:
    """Return the form that these options of `Streaming` say; compact states replace both others."""
    if compact_low_bits is not None:
        return Form(compact_low_bits / 8, 1 + 2 / COMPACT_BLOCK_ELEMENTS, is_compact=True)
    return Form(FP32_BYTES / 2 if hi_lo_masters else FP32_BYTES, moment_bytes)


# By the name that a plan gives them; `reference_impl.verification.plan_document` has the options of each.
FORMS: dict[str, Form] = {
    "exact": form(hi_lo_masters=True, moment_bytes=4, compact_low_bits=None),
    "packed": form(hi_lo_masters=True, moment_bytes=2, compact_low_bits=None),
    "compact-16": form(hi_lo_masters=False, moment_bytes=4, compact_low_bits=16),
    "compact-8": form(hi_lo_masters=False, moment_bytes=4, compact_low_bits=8),
}


class StateBytes(NamedTuple):
    """Mean bytes an element: held by each share, moved one way by the streamed and by the CPU share.

    `staging` is the gradient down and the weight up. Updating on the CPU reads and writes every host byte once, and
    the link's copies read or write staging twice more: `4 * staging + 2 * (cpu_host - staging)` of host traffic.
    """

    resident: float
    streamed: float
    cpu_host: float
    staging: float

    @property
    def cpu_traffic(self) -> float:
        """Bytes of host memory that one CPU update reads and writes, its copies included."""
        return 4 * self.staging + 2 * (self.cpu_host - self.staging)

    @property
    def streamed_traffic(self) -> float:
        """Bytes of host memory that one streamed update reads and writes."""
        return 2 * self.streamed


def state_bytes(sizes: Iterable[tuple[int, int]], *, moments: int, streams_as: Form = WHOLE) -> StateBytes:
    """Return the mean over parameters of (elements, bytes an element of the weight)."""
    listed = list(sizes)
    elements = max(sum(numel for numel, _ in listed), 1)

    def mean(of_parameter: dict[int, float]) -> float:
        return sum(numel * of_parameter[min(size, 4)] for numel, size in listed) / elements

    return StateBytes(
        resident=mean({2: 4 + 4 * moments, 4: 4 * moments}),
        streamed=mean({size: streams_as.bytes(moments, is_own_master=size == 4) for size in (2, 4)}),
        cpu_host=mean({2: 2 + 4 + 4 * moments, 4: 4 + 4 + 4 * moments}),
        staging=mean({2: 2, 4: 4}),
    )


def adam_bytes(weight_bytes: float, streams_as: Form) -> StateBytes:
    """Return the same of Adam where weights have a mean of `weight_bytes`: from 4 bytes on, they are own masters."""
    is_own_master = weight_bytes >= FP32_BYTES
    return StateBytes(
        resident=ADAM_BYTES - (FP32_BYTES if is_own_master else 0),
        streamed=streams_as.bytes(ADAM_MOMENTS, is_own_master=is_own_master),
        cpu_host=ADAM_BYTES + weight_bytes,
        staging=weight_bytes,
    )


def streamed_muon_bytes(weight_bytes: float, streams_as: Form, share: float) -> float:
    """Return the mean bytes of a streamed element where Muon updates a `share` of them, and AdamW the rest."""
    is_own_master = weight_bytes >= FP32_BYTES
    of_muon = streams_as.signed_bytes(MUON_MOMENTS, is_own_master=is_own_master)
    of_adam = streams_as.bytes(ADAM_MOMENTS, is_own_master=is_own_master)
    return share * of_muon + (1 - share) * of_adam


def scratch_bytes(*, has_half_masters: bool, is_rounded: bool) -> int:
    """Return the bytes on the device that the update of one element of a chunk needs beside the chunk's slot.

    That is an fp32 gradient, and for half masters an fp32 master and a bf16 weight; for rounded moments nothing.
    """
    if is_rounded:
        return 0
    return 2 * FP32_BYTES + BF16_BYTES if has_half_masters else FP32_BYTES
