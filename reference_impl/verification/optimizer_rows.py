"""Rows of `verify` for optimizer state on the host: updated there, or streamed through the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reference_impl.verification.attachments import hybrid, streamed
from reference_impl.verification.mechanisms import Mechanism, Reference, Scale

MAX_GRAD_NORM = 1.0
# fp32 master and two fp32 moments of an offloaded bf16 element.
STATE_BYTES = 12
# The same with only the lower half of the master.
_HALVED_BYTES = 10
_SLOTS = 3
_SPLIT = (0.2, 0.5, 0.3)


def optimizer_rows(scale: Scale, plain: Reference) -> Iterator[Mechanism]:
    """Yield the rows of `HybridDeviceOptimizer` and `OptimizerStateOffloader`."""
    for fraction in (0.5, 1.0):
        yield _hybrid(plain, fraction)
        yield _hybrid(plain, fraction, attached=True)
    clipped = replace(plain, name="without offload, clipped", max_grad_norm=MAX_GRAD_NORM)
    yield _hybrid(clipped, 1.0, attached=True)
    yield _streamed(scale, plain)
    yield _streamed(scale, clipped)
    yield _halved(scale, plain)
    yield _three_shares(scale, clipped)


def _hybrid(reference: Reference, fraction: float, *, attached: bool = False) -> Mechanism:
    offloaded = round(fraction * reference.workload.parameters)
    return Mechanism(
        name=f"optimizer {fraction:.0%}{', attached' * attached}{_clipped(reference)}",
        reference=reference,
        attach=hybrid(offload_fraction=fraction, attached=attached, max_grad_norm=reference.max_grad_norm),
        freed_bytes=STATE_BYTES * offloaded,
        formula=f"{STATE_BYTES} B x {offloaded:,} offloaded elements",
        same_kernels=False,
    )


def _streamed(scale: Scale, reference: Reference) -> Mechanism:
    numel = reference.workload.parameters
    return Mechanism(
        name=f"optimizer states streamed, attached{_clipped(reference)}",
        reference=reference,
        attach=streamed(chunk_bytes=scale.chunk_bytes, max_grad_norm=reference.max_grad_norm),
        freed_bytes=STATE_BYTES * numel - _ring_bytes(scale),
        formula=f"{STATE_BYTES} B x {numel:,} elements, less {_SLOTS} slots and fp32 gradients of one chunk",
        same_kernels=True,
    )


def _halved(scale: Scale, reference: Reference) -> Mechanism:
    numel, chunk = reference.workload.parameters, scale.chunk_bytes // _HALVED_BYTES
    # Master, exp_avg_sq and weight are unpacked beside the gradients.
    device_bytes = chunk * (_SLOTS * _HALVED_BYTES + 4 + 4 + 4 + 2)
    return Mechanism(
        name="optimizer states streamed, half masters, attached",
        reference=reference,
        attach=streamed(chunk_bytes=scale.chunk_bytes, hi_lo_masters=True),
        freed_bytes=STATE_BYTES * numel - device_bytes,
        formula=f"{STATE_BYTES} B x {numel:,} elements, less {_SLOTS} slots of {_HALVED_BYTES} B an element and "
        "gradients, masters, second moments and weights of one chunk",
        same_kernels=True,
    )


def _three_shares(scale: Scale, reference: Reference) -> Mechanism:
    leaving = round((1 - _SPLIT[0]) * reference.workload.parameters)
    resident, by_stream, by_cpu = (f"{share:.0%}" for share in _SPLIT)
    return Mechanism(
        name=f"optimizer {resident} resident, {by_stream} streamed, {by_cpu} on the CPU, attached{_clipped(reference)}",
        reference=reference,
        attach=hybrid(
            split=_SPLIT,
            chunk_bytes=scale.chunk_bytes,
            attached=True,
            max_grad_norm=reference.max_grad_norm,
        ),
        freed_bytes=STATE_BYTES * leaving - _ring_bytes(scale),
        formula=f"{STATE_BYTES} B x {leaving:,} elements, less {_SLOTS} slots and fp32 gradients of one chunk",
        same_kernels=False,
    )


def _ring_bytes(scale: Scale) -> int:
    # A chunk's gradients in fp32 are 4 of the 12 bytes of its states.
    return _SLOTS * scale.chunk_bytes + scale.chunk_bytes * 4 // STATE_BYTES


def _clipped(reference: Reference) -> str:
    return "" if reference.max_grad_norm is None else ", clipped"
