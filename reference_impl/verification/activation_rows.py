"""Rows of `verify` for saved activations: by layer, under a budget, on disk, by module, and as layer inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.device import Device
from reference_impl.verification.attachments import beside_plain, with_disk
from reference_impl.verification.mechanisms import Mechanism, PeakOf, Reference, Scale
from reference_impl.verification.saved_bytes import saved_bytes

_MODULES = ("core_attention", "down")


def activation_rows(scale: Scale, plain: Reference, device: Device, peak_of: PeakOf) -> Iterator[Mechanism]:
    """Yield the rows of `ActivationOffloader` and `CheckpointOffloader`."""
    layers = scale.workload.shape.layers
    # What may wait for its copy is part of the peak; here nothing may.
    options: dict[str, Any] = {"min_bytes": scale.min_bytes, "in_flight_bytes": 0}
    count = partial(saved_bytes, scale.workload, device, min_bytes=scale.min_bytes)
    row = partial(Mechanism, reference=plain, same_kernels=True)
    # Backward needs the last layer at once, so it stays.
    most, everything = count(layers=layers - 1), count(layers=layers)
    yield row(
        name=f"activations of {layers - 1} layers",
        attach=beside_plain(lambda model: ActivationOffloader(model, num_layers=layers - 1, **options)),
        freed_bytes=most,
        formula=_storages(layers - 1),
    )
    yield row(
        name=f"activations of {layers - 1} layers, half on disk",
        attach=with_disk(
            lambda model, disk: ActivationOffloader(
                model, num_layers=layers - 1, host_limit_bytes=most // 2, disk=disk, **options
            ),
            limit_bytes=most,
        ),
        freed_bytes=most,
        formula=_storages(layers - 1),
    )
    yield row(
        name="activations under a budget",
        attach=beside_plain(
            lambda model: ActivationOffloader(
                model, budget_bytes=peak_of(plain) - everything // 2, min_bytes=scale.min_bytes
            )
        ),
        freed_bytes=everything // 2,
        formula="half of the storages that all layers save, as the budget demands",
    )
    yield row(
        name=f"inputs of {' and '.join(_MODULES)}",
        attach=beside_plain(lambda model: ActivationOffloader(model, modules=_MODULES, **options)),
        freed_bytes=count(inputs_of=_MODULES),
        formula="inputs that only these modules save, each once",
    )
    yield row(
        name="recompute, layer inputs offloaded",
        attach=beside_plain(lambda model: CheckpointOffloader(model, **options)),
        freed_bytes=everything,
        formula=_storages(layers),
    )


def _storages(layers: int) -> str:
    return f"storages that {layers} layers save, each once"
