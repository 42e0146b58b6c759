"""Does every mechanism compute what a run without it computes, and free the memory that it should?

Trains a small decoder without offload and with each mechanism, from the same weights on the same data, and
compares: losses, final parameters, peak device bytes against a prediction. It judges mechanisms on this machine;
what a large model needs is `offload plan`'s part.
"""

from __future__ import annotations

from reference_impl.device import Device
from reference_impl.verification.activation_rows import activation_rows
from reference_impl.verification.attachments import plain
from reference_impl.verification.mechanisms import Reference, Scale
from reference_impl.verification.model import DecoderShape
from reference_impl.verification.optimizer_rows import optimizer_rows
from reference_impl.verification.steps import Progress, Steps, unseen
from reference_impl.verification.train import Trained, train
from reference_impl.verification.verification import Row, Verification, compare
from reference_impl.verification.weight_rows import weight_rows
from reference_impl.verification.workload import Workload

# Sizes at which activations outweigh gradients, so that the peak of every row is that of the loss, where nothing
# but weights, states and activations lives; kernels of the CPU twin are then a few milliseconds long.
TWIN = Scale(
    workload=Workload(
        shape=DecoderShape(hidden=96, ffn=256, layers=4, heads=3, vocab=1024), batch=3, tokens=128
    ),
    min_bytes=2**10,
    chunk_bytes=192 * 2**10,
)
CUDA = Scale(
    workload=Workload(
        shape=DecoderShape(hidden=1024, ffn=2816, layers=8, heads=8, vocab=32000), batch=8, tokens=1024
    ),
    min_bytes=2**20,
    chunk_bytes=96 * 2**20,
)


def verify(device: Device, *, progress: Progress = unseen) -> Verification:
    """Train every row on `device` and judge it; on the CPU twin this takes less than a minute."""
    scale = CUDA if device.is_cuda else TWIN
    without_offload = Reference(name="without offload", workload=scale.workload)
    expected: dict[Reference, Trained] = {}
    rows = [
        *optimizer_rows(scale, without_offload),
        *activation_rows(
            scale, without_offload, device, lambda reference: expected[reference].peak_device_bytes
        ),
        *weight_rows(scale),
    ]
    references = dict.fromkeys(row.reference for row in rows)
    steps = Steps(progress, total=(len(rows) + len(references)) * scale.workload.steps)
    for reference in references:
        attach = plain(max_grad_norm=reference.max_grad_norm)
        expected[reference] = train(reference.workload, device, attach, on_step=steps.of(reference.name))
    judged: list[Row] = []
    for row in rows:
        trained = train(row.reference.workload, device, row.attach, on_step=steps.of(row.name))
        bitwise = row.same_kernels or not device.is_cuda
        judged.append(compare(row, expected[row.reference], trained, bitwise=bitwise))
    return Verification(
        device=device.name,
        workload=scale.workload,
        without_offload=expected[without_offload],
        rows=tuple(judged),
    )
