# SPDX-License-Identifier: Apache-2.0
"""Saving, loading, resuming and changing weights while they live on the host."""

import copy

import pytest
import torch
from layers_trainee import CLIP, OPTIONS, assert_same, batches, decoder, resident, streamed, train, wrapped

from reference_impl import TrainableLayerStreamer
from reference_impl.optimizers.options import Streaming

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
SLOW = pytest.mark.slow
FORMS = [
    {},
    pytest.param({"states": "compact-8"}, marks=SLOW),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_run_that_resumes_goes_on_bit_for_bit(device, form, optimizer_first):
    ids = batches(device, 6)
    model = decoder(device)
    with streamed(model, streaming=Streaming(**form)) as streamer:
        train(model, streamer.optimizer, ids[:3])
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        states = copy.deepcopy(streamer.optimizer.state_dict())
        expected = train(model, streamer.optimizer, ids[3:])
    torch.manual_seed(7)
    again = decoder(device)
    torch.nn.init.zeros_(again.layers[0].qkv.weight)
    # Another window and other chunks.
    streaming = Streaming(chunk_bytes=2**15, **form)
    with streamed(again, streaming=streaming, prefetch=0) as streamer:
        if optimizer_first:
            again.load_state_dict(weights)
            streamer.optimizer.load_state_dict(states)
        else:
            # In the middle of a run, with weights of the window on the device.
            train(again, streamer.optimizer, ids[:1])
            streamer.optimizer.load_state_dict(states)
            again.load_state_dict(weights)
            streamer.optimizer.load_state_dict(states)
        assert train(again, streamer.optimizer, ids[3:]) == expected
        for name, value in again.state_dict().items():
            assert torch.equal(value.cpu(), dict(model.named_parameters())[name].detach().cpu()), name


def test_it_goes_on_from_adamw_and_adamw_from_it(device):
    ids = batches(device, 6)
    other = decoder(device, dtype=torch.float32)
    reference = torch.optim.AdamW(other.parameters(), fused=True, **OPTIONS)
    expected = train(other, reference, ids)

    model = decoder(device, dtype=torch.float32)
    plain = wrapped(model)
    losses = train(model, plain, ids[:2])
    with TrainableLayerStreamer(model, plain) as streamer:
        losses += train(model, streamer.optimizer, ids[2:4])
        states = copy.deepcopy(streamer.optimizer.state_dict())
    plain = wrapped(model)
    plain.load_state_dict(states)
    losses += train(model, plain, ids[4:])
    # Recomputed layers give the same bits, and nothing is clipped.
    assert losses == expected
    for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param)


def test_a_step_that_is_not_carried_out_yet_is_saved_and_closed(device):
    ids = batches(device, 2)
    other, model, closed = (decoder(device) for _ in range(3))
    train(other, resident(other), ids)
    with streamed(model) as streamer, streamed(closed) as second:
        train(model, streamer.optimizer, ids)
        train(closed, second.optimizer, ids)
        assert streamer.optimizer.streamed.unqueued > 0
        # The weights first: saving them carries the update out.
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), dict(other.named_parameters())[name].detach().cpu()), name
    for param, expected_param in zip(closed.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param)


@pytest.mark.parametrize("pending", [False, True])
def test_weights_are_read_and_changed_while_they_are_lent(device, pending):
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    reference = resident(other)
    with streamed(model) as streamer:
        train(other, reference, ids[:2])
        train(model, streamer.optimizer, ids[:2])
        if not pending:
            streamer.optimizer.synchronize()
        with streamer.gathered():
            for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(param, expected_param)
            with torch.no_grad():
                model.layers[2].up.weight[3] = 0.25
        with torch.no_grad():
            other.layers[2].up.weight[3] = 0.25
            index = [name for name, _ in other.named_parameters()].index("layers.2.up.weight")
            # Its master is made anew, all others keep their lower halves.
            reference.masters[index].copy_(other.layers[2].up.weight)
        train(other, reference, ids[2:])
        train(model, streamer.optimizer, ids[2:])
        assert_same(model, streamer.optimizer, other, reference)


@pytest.mark.parametrize("overlap", ["gradients", "update"])
def test_a_weight_that_was_written_is_saved_and_stays_when_it_is_closed(device, overlap):
    model = decoder(device)
    # All blocks stay on the device once they are there.
    with streamed(model, max_grad_norm=None, backward_overlap=overlap, prefetch=3) as streamer:
        train(model, streamer.optimizer, batches(device, 1))
        with torch.no_grad():
            model(batches(device, 1)[0])
            weight = model.layers[3].up.weight
            weight[3] = 7.0
        expected = weight.clone()
        assert torch.equal(model.state_dict()["layers.3.up.weight"], expected.cpu())
    assert torch.equal(weight, expected)


def test_weights_cannot_be_used_where_they_do_not_visit(device):
    model = decoder(device)
    with streamed(model, prefetch=0) as streamer:
        train(model, streamer.optimizer, batches(device, 1))
        with pytest.raises(RuntimeError, match=r"layers\.3\.up\.weight is not on the device"):
            model.layers[3].up.weight.sum()
        with streamer.gathered(model.layers[3]):
            model.layers[3].up.weight.sum()
    model.layers[3].up.weight.sum()


def test_a_copy_is_a_plain_model(device):
    ids = batches(device, 3)
    model = decoder(device)
    with streamed(model) as streamer:
        train(model, streamer.optimizer, ids[:2])
        twin = copy.deepcopy(model)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for name, param in twin.named_parameters():
            assert torch.equal(param.cpu(), expected[name].cpu()), name
        train(model, streamer.optimizer, ids[2:])
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), ids[:1])


def test_a_scheduler_of_the_wrapped_optimizer_is_followed(device):
    ids = batches(device, 4)
    other, model = decoder(device), decoder(device)
    reference = resident(other)
    rates = torch.optim.lr_scheduler.StepLR(reference.inner, 1, gamma=0.5)
    plain = wrapped(model)
    with TrainableLayerStreamer(model, plain, max_grad_norm=CLIP) as streamer:
        schedule = torch.optim.lr_scheduler.StepLR(streamer.optimizer, 1, gamma=0.5)
        for batch in ids:
            train(other, reference, [batch])
            rates.step()
            train(model, streamer.optimizer, [batch])
            schedule.step()
        assert plain.param_groups[0]["lr"] == OPTIONS["lr"] / 16
        assert_same(model, streamer.optimizer, other, reference)


def test_after_closing_weights_are_lent_for_good(device):
    model = decoder(device)
    streamer = streamed(model)
    train(model, streamer.optimizer, batches(device, 1))
    streamer.close()
    with streamer.gathered():
        assert model.layers[0].up.weight.sum().isfinite()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(device, 1))
