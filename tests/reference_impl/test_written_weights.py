# SPDX-License-Identifier: Apache-2.0
"""Every way to write a weight, beside every class that keeps layers' weights: the losses are those of plain torch.

Autograd's version counter sees some of these ways only.
"""

import re
from contextlib import suppress

import pytest
import torch
from in_turns import in_turns
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from weight_writes import WAYS, batches_on, decoder, in_place, losses_of, plain_losses, trained_by

from reference_impl import ActivationOffloader, FrozenLayerStreamer, TrainableLayerStreamer
from reference_impl.verification.model import decoder_loss

_REFUSAL = r"layers\.\d\.gate\.(base\.)?weight (is not on the device|has changed)"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(device):
    return batches_on(device)


@in_turns(way=WAYS, frozen=[True, False])
def test_offloaded_layers_have_what_was_written(device, batches, way, frozen):
    model = decoder(device, lora=frozen)
    name = "layers.0.gate.base.weight" if frozen else "layers.0.gate.weight"
    with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
        found = losses_of(model, batches, WAYS[way], param=model.get_parameter(name))
    assert found == plain_losses(device, way, name, lora=frozen)


def test_offloaded_layers_have_what_was_written_through_what_was_held_before(device, batches):
    """Slices of one buffer, which are written through the buffer."""

    def run(offloads):
        model = decoder(device, lora=True)
        frozen = [p for p in model.layers[0].parameters() if not p.requires_grad]
        buffer = parameters_to_vector(frozen).detach().clone()
        vector_to_parameters(buffer, frozen)
        kept = frozen[0].data
        if not offloads:
            return losses_of(model, batches, lambda _: (buffer.mul_(0.9), kept.add_(0.01)), param=None)
        with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
            return losses_of(model, batches, lambda _: (buffer.mul_(0.9), kept.add_(0.01)), param=None)

    assert run(offloads=True) == run(offloads=False)


def test_offloaded_layers_have_what_their_own_forward_has_written(device, batches):
    def run(offloads):
        model = decoder(device, lora=True)
        param = model.layers[0].gate.base.weight

        def write(*_):
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                in_place(param)

        model.layers[0].attention_norm.register_forward_pre_hook(write)
        if not offloads:
            return losses_of(model, batches, in_place, param=param)
        with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
            return losses_of(model, batches, in_place, param=param)

    assert run(offloads=True) == run(offloads=False)


def plain_or_refused(run, expected, refusal=_REFUSAL):
    """Check that `run()` gives the `expected` losses, or an error with the weight's name."""
    try:
        found = run()
    except RuntimeError as error:
        found = str(error)
    assert re.search(refusal, found) if isinstance(found, str) else found == expected


@in_turns(way=WAYS, layer=[0, 1, 2])
def test_streamed_frozen_layers_have_what_was_written_or_name_it(device, batches, way, layer):
    name = f"layers.{layer}.gate.base.weight"

    def run():
        model = decoder(device, lora=True)
        param = model.get_parameter(name)
        with FrozenLayerStreamer(model, prefetch=1):
            return losses_of(model, batches, WAYS[way], param=param)

    plain_or_refused(run, plain_losses(device, way, name, lora=True))


@pytest.mark.parametrize("way", WAYS)
def test_streamed_frozen_layers_have_what_was_written_where_they_are_gathered(device, batches, way):
    model, name = decoder(device, lora=True), "layers.1.gate.base.weight"
    param = model.get_parameter(name)
    with FrozenLayerStreamer(model, prefetch=1) as streamer:

        def write(param):
            with streamer.gathered(model.layers[1]):
                WAYS[way](param)

        found = losses_of(model, batches, write, param=param)
    assert found == plain_losses(device, way, name, lora=True)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_to_a_streamed_layer_is_not_lost_by_its_refusal(device, batches, way):
    """As the error says nothing is lost: the weight has the written value once the streamer is closed."""
    model = decoder(device, lora=True)
    loaded = model.layers[0].gate.base.weight
    with FrozenLayerStreamer(model, prefetch=1):
        decoder_loss(model(batches[0]), batches[0]).backward()
        expected = loaded.detach().clone()
        WAYS[way](loaded)
        saved = model.state_dict()["layers.0.gate.base.weight"]
        with suppress(RuntimeError):
            model(batches[1])
    plain = torch.nn.Parameter(expected, requires_grad=False)
    WAYS[way](plain)
    assert torch.equal(saved.cpu(), plain.cpu())
    assert torch.equal(loaded, plain)


def test_nobody_looks_at_streamed_weights_that_nobody_touches(device, batches, monkeypatch):
    """A comparison would copy them to the host and wait for it."""
    model = decoder(device, lora=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with FrozenLayerStreamer(model, prefetch=1):
        monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a copy to the host"))
        for ids in batches:
            decoder_loss(model(ids), ids).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            assert sum(param.numel() for param in model.parameters() if not param.requires_grad) > 0
            with torch.no_grad():
                model(ids)


@in_turns(
    way=WAYS,
    name=["layers.0.gate.weight", "layers.2.gate.weight", "head.weight"],
    overlap=["gradients", "update"],
)
def test_streamed_trained_layers_have_what_was_written_or_name_it(device, batches, way, name, overlap):
    """A lingering block, an absent one, and a resident one."""

    def run():
        model = decoder(device)
        param = model.get_parameter(name)

        def write(_):
            WAYS[way](param)

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with TrainableLayerStreamer(model, optimizer, prefetch=1, backward_overlap=overlap) as streamer:
            return trained_by(streamer.optimizer, model, batches, write)

    plain_or_refused(run, plain_losses(device, way, name))
