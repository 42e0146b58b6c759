# SPDX-License-Identifier: Apache-2.0
"""An optimizer given to another one shares its groups, and refuses calls that need its states."""

import gc
import warnings

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, fresh, streaming, train

from reference_impl import TrainableLayerStreamer
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss


def adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)


def ways_to_use(given):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(given, factor=1.0)
    return {
        "step": given.step,
        "step with a closure": lambda: given.step(lambda: pytest.fail("the closure has run")),
        "a scheduler's": lambda: scheduler.optimizer.step(),
        "GradScaler": lambda: scaler.step(given),
        "state_dict": given.state_dict,
        "load_state_dict": lambda: given.load_state_dict({"state": {}, "param_groups": []}),
    }


@pytest.mark.parametrize(
    "way", ["step", "step with a closure", "a scheduler's", "GradScaler", "state_dict", "load_state_dict"]
)
def test_every_way_to_use_it_names_the_one_that_has_its_states(device, way):
    model, plain = fresh(device, torch.float32), fresh(device, torch.float32)
    data = batches(device.torch_device, 3)
    expected = train(plain, adamw(plain), data)
    given = adamw(model)
    use = ways_to_use(given)[way]
    with streaming(model, wrapped=given) as optimizer:
        optimizer.attach(model)
        found = train(model, optimizer, data[:1])
        model(data[1]).backward()
        with pytest.raises(RuntimeError, match=r"AdamW was stepped, saved or loaded.*try its step"):
            use()
        optimizer.zero_grad()
        found += train(model, optimizer, data[1:])
    assert found == expected
    assert not given.state


def test_it_may_step_again_once_the_other_one_is_closed_or_gone(device):
    model = fresh(device)
    for ends in ("closed", "collected"):
        given = adamw(model)
        optimizer = streaming(model, wrapped=given)
        train(model, optimizer, batches(device.torch_device, 1))
        if ends == "closed":
            optimizer.close()
        del optimizer
        gc.collect()
        train(model, given, batches(device.torch_device, 1))
        assert given.state


def test_a_scheduler_of_it_that_steps_behind_the_other_one_warns_of_nothing(device):
    model, plain = fresh(device, torch.float32), fresh(device, torch.float32)
    data = batches(device.torch_device, 4)

    def train_with(model, optimizer, scheduler):
        losses = []
        for batch in data:
            losses += train(model, optimizer, [batch])
            scheduler.step()
        return losses

    theirs, given = adamw(plain), adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.1)
    expected = train_with(plain, theirs, torch.optim.lr_scheduler.ExponentialLR(theirs, 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with streaming(model, wrapped=given) as optimizer:
            assert train_with(model, optimizer, scheduler) == expected


def test_groups_stay_the_same_objects_when_states_are_loaded(device):
    model = fresh(device)
    given = adamw(model)
    with streaming(model, wrapped=given) as optimizer:
        (group,) = given.param_groups
        optimizer.load_state_dict(optimizer.state_dict())
        group["lr"] = 0.5
        assert optimizer.param_groups[0]["lr"] == given.param_groups[0]["lr"] == 0.5


def test_layers_that_stream_refuse_it_where_gradients_stand(device):
    torch.manual_seed(0)
    model, ids = Decoder(DecoderShape()).to(device.torch_device), torch.arange(32, device=device.torch_device)
    given = adamw(model)
    with TrainableLayerStreamer(model, given) as streamer:
        decoder_loss(model(ids.view(1, 32)), ids.view(1, 32)).backward()
        with pytest.raises(RuntimeError, match="expected the TrainedLayersOptimizer"):
            given.step()
        streamer.optimizer.step()
