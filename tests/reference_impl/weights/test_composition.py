# SPDX-License-Identifier: Apache-2.0
"""Streamed weights beside offloaded activations: the same bits, each told apart."""

import pytest
import torch

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.weights import FrozenLayerStreamer

ACTIVATIONS = [ActivationOffloader, CheckpointOffloader]


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(
    ("weights_first", "weights_close_first"),
    [
        (True, False),
        (False, True),
        *(pytest.param(each, each, marks=pytest.mark.slow) for each in (True, False)),
    ],
)
def test_with_offloaded_activations(trainee, activations, weights_first, weights_close_first):
    expected = trainee.step()

    def stream():
        return FrozenLayerStreamer(trainee.model, prefetch=1)

    def offload():
        return activations(trainee.model, min_bytes=1)

    makers = [stream, offload] if weights_first else [offload, stream]
    attached = [make() for make in makers]
    streamer, offloader = attached if weights_first else attached[::-1]
    for _ in range(3):
        assert trainee.step() == expected
    moved = offloader.offloaded_bytes
    assert moved > 0
    loaded = streamer.report.loaded_bytes
    trainee.step()
    assert offloader.offloaded_bytes > moved
    assert streamer.report.loaded_bytes - loaded == 2 * (6 - 2) * trainee.layer_bytes
    for mechanism in [streamer, offloader] if weights_close_first else [offloader, streamer]:
        mechanism.close()
        assert trainee.step() == expected


def test_weights_are_no_activations(trainee):
    """The activation engine moves the same tensors with and without streaming."""
    moved = []
    for streams in (False, True):
        streamer = FrozenLayerStreamer(trainee.model, prefetch=1) if streams else None
        with ActivationOffloader(trainee.model, min_bytes=1) as offloader:
            trainee.step()
            moved.append(offloader.offloaded_bytes)
        if streamer is not None:
            streamer.close()
    assert moved[0] == moved[1]


@pytest.mark.slow
def test_compiled_blocks(trainee):
    for layer in trainee.layers:
        layer.compile(backend="aot_eager")
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        for _ in range(3):
            assert trainee.step() == expected
    torch.compiler.reset()
