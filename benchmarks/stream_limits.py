# SPDX-License-Identifier: Apache-2.0
"""The least time of a step whose trained layers stream: compute, and bytes over the measured link.

Apart because it predicts, and `larger_than_gpu` measures. docs/larger-than-gpu.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from reference_impl.device import Device
from reference_impl.memory.rates import CopyRates, best_seconds, copy_rates

_Model = TypeVar("_Model")


@dataclass(frozen=True)
class Compute:
    """Seconds of a step without its update: `forward` up to the head, and the loss and backward behind it."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Traffic:
    """The copies of a step: elements, and the bytes of an element's states each way.

    `parameters` are all trained ones, `streamed` those of weights that do not stay on the device.
    """

    parameters: int
    streamed: int
    states_bytes: float


def link(device: Device) -> CopyRates:
    """Measure the link with pieces as large as the streams copy."""
    return copy_rates(device, 2**28 if device.is_accelerator else 2**22)


def compute_of(
    build: Callable[[int], _Model],
    forward: Callable[[_Model], torch.Tensor],
    loss: Callable[[_Model, torch.Tensor], torch.Tensor],
    *,
    layers: int,
    device: Device,
) -> Compute:
    """Return the compute of `layers` layers, from models of few layers that `build` makes on the device."""
    few, more = 1, 3
    seconds = {}
    for count in (few, more):
        model = build(count)

        def run(model: _Model = model) -> None:
            loss(model, forward(model)).backward()
            device.synchronize()

        def run_forward(model: _Model = model) -> None:
            forward(model)
            device.synchronize()

        forward_s = best_seconds(run_forward)
        seconds[count] = forward_s, best_seconds(run) - forward_s
        del model
    (forward_few, backward_few), (forward_more, backward_more) = seconds[few], seconds[more]
    each_s = (forward_more - forward_few) / (more - few), (backward_more - backward_few) / (more - few)
    return Compute(
        forward_s=forward_few + (layers - few) * each_s[0],
        backward_s=backward_few + (layers - few) * each_s[1],
    )


def limit_s(compute: Compute, traffic: Traffic, rates: CopyRates, *, clips: bool) -> float:
    """Return the least seconds of a step.

    With clipping states pass in the next forward, behind all gradients; without it in backward, beside the gradients;
    these then never leave.
    """
    weights, states = 2 * traffic.streamed, traffic.states_bytes * traffic.parameters
    gradients = 2 * traffic.parameters
    if clips:
        return max(compute.backward_s, over_link(weights, gradients, rates)) + max(
            compute.forward_s, over_link(weights + gradients + states, weights + states, rates)
        )
    return max(compute.forward_s, over_link(weights, 0, rates)) + max(
        compute.backward_s, over_link(weights + states, weights + states, rates)
    )


def over_link(inwards: float, outwards: float, rates: CopyRates) -> float:
    """Return the seconds of so many bytes in both directions."""
    return max(inwards / rates.h2d, outwards / rates.d2h, (inwards + outwards) / rates.duplex)
