# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from interrupted import at_each_bytecode

from reference_impl import HybridDeviceOptimizer, park
from reference_impl.activations import ActivationOffloader
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 1024}


def train(trainee, steps=4):
    optimizer = torch.optim.AdamW([p for p in trainee.model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = trainee.loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_training_is_bitwise_the_same(trainee, activations, num_layers):
    start = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    expected = train(trainee)
    final = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    trainee.model.load_state_dict(start)
    with ActivationOffloader(
        trainee.model, num_layers=num_layers, activations=activations, weights=True, **SMALL
    ) as offloader:
        assert train(trainee) == expected
        assert (offloader.offloaded_bytes > 0) == activations
    for name, value in trainee.model.state_dict().items():
        assert torch.equal(value, final[name])


def test_weights_that_layers_share_stay(trainee):
    """A layer's weight would be away while another one computes with it."""
    layers = trainee.model.layers
    with torch.no_grad():
        layers[2].up.weight.copy_(layers[0].up.weight)
    layers[2].up.weight = layers[0].up.weight
    start = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    expected = train(trainee)
    trainee.model.load_state_dict(start)
    with ActivationOffloader(trainee.model, weights=True, **SMALL):
        assert train(trainee) == expected


def test_an_optimizer_is_saved_and_parked_while_the_weights_are_away(trainee):
    """It looks for weights that other code has written, on the device."""
    model = trainee.model
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for saves in (False, True):
        model.load_state_dict(start)
        with (
            ActivationOffloader(model, weights=True, **SMALL),
            HybridDeviceOptimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2) as optimizer,
        ):
            optimizer.attach(model)
            parked = park(model, optimizer)
            for _ in range(3):
                loss = trainee.loss()
                if saves:
                    optimizer.state_dict()
                    with parked:
                        pass
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            parked.close()
    assert losses[:3] == losses[3:]


def layer_bytes(model):
    return sum(p.nbytes for p in model.layers[0].parameters() if p.nbytes >= 1024)


def test_changed_weights_leave_once_a_step_and_frozen_ones_once(trainee):
    with ActivationOffloader(
        trainee.model, num_layers=3, activations=False, weights=True, **SMALL
    ) as offloader:
        train(trainee, steps=4)
        assert offloader.offloaded_weight_bytes == 4 * 3 * layer_bytes(trainee.model)
    trainee.model.layers.requires_grad_(False)
    with ActivationOffloader(
        trainee.model, num_layers=3, activations=False, weights=True, **SMALL
    ) as offloader:
        train(trainee, steps=4)
        assert offloader.offloaded_weight_bytes == 3 * layer_bytes(trainee.model)


def test_weights_that_an_optimizer_writes_past_the_version_counter_are_not_lost(trainee):
    def train_by_data():
        for _ in range(3):
            trainee.model.zero_grad()
            trainee.loss().backward()
            for parameter in trainee.model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
        return {name: value.clone() for name, value in trainee.model.state_dict().items()}

    start = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    expected = train_by_data()
    trainee.model.load_state_dict(start)
    with ActivationOffloader(trainee.model, weights=True, **SMALL):
        for name, value in train_by_data().items():
            assert torch.equal(value, expected[name])


def test_frozen_weights_that_were_written_leave_again(trainee):
    trainee.model.layers.requires_grad_(False)
    with ActivationOffloader(trainee.model, weights=True, **SMALL):
        trainee.step()
        with torch.no_grad():
            trainee.model.layers[0].down.weight.mul_(2)
        got = trainee.step()
    assert got == trainee.step()


def test_between_forward_and_backward_the_weights_are_off_the_device(trainee, device):
    with (
        Ledger(device, track=trainee.model.parameters()) as ledger,
        ActivationOffloader(trainee.model, activations=False, weights=True, **SMALL),
    ):
        before = ledger.device_bytes
        with torch.no_grad():
            trainee.loss()
        assert ledger.device_bytes >= before
        loss = trainee.model.layers[1](torch.randn(1, 1, 64, device=device.torch_device)).sum()
        assert before - ledger.device_bytes > 0.9 * layer_bytes(trainee.model)
        loss.backward()
        trainee.model.zero_grad()
        assert ledger.device_bytes >= before


def test_a_state_dict_is_whole_at_any_time(trainee):
    expected = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    with ActivationOffloader(trainee.model, weights=True, **SMALL):
        loss = trainee.loss()
        for name, value in trainee.model.state_dict().items():
            assert torch.equal(value, expected[name])
        loss.backward()


def test_after_an_error_the_next_step_is_right(trainee):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, weights=True, **SMALL):
        hook = trainee.model.layers[2].down.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainee.step()
        hook.remove()
        assert trainee.step() == expected


def test_weights_that_a_lost_device_cannot_take_back_say_so(trainee, device, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("CUDA error: planted")

    offloader = ActivationOffloader(trainee.model, weights=True, **SMALL)
    loss = trainee.loss()
    monkeypatch.setitem(vars(device), "copy_in", lost)
    with pytest.warns(UserWarning, match="which is lost: CUDA error: planted"):
        offloader.close()
    with pytest.raises(
        RuntimeError, match=r"layers\.0\..*\.weight is not on the device; .*try a new process"
    ):
        trainee.loss()
    del loss


def test_module_level_offload_leaves_weights_alone(trainee):
    with pytest.raises(ValueError, match="weights=True offloads the weights of whole layers"):
        ActivationOffloader(trainee.model, modules=["down"], weights=True)


def test_a_step_that_ctrl_c_cut_short_is_left_out_and_the_next_has_all_weights(trainee, device):
    if device.is_accelerator:
        pytest.skip("the twin runs the same lines")
    start = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    expected = train(trainee, steps=1)
    final = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    trainee.model.load_state_dict(start)
    with ActivationOffloader(trainee.model, num_layers=3, activations=False, weights=True, **SMALL):

        def begin():
            trainee.model.load_state_dict(start)
            trainee.model.zero_grad()

        def check(_, where):
            trainee.model.zero_grad()
            assert train(trainee, steps=1) == expected, where
            for name, value in trainee.model.state_dict().items():
                assert torch.equal(value, final[name]), f"{where}: {name}"

        at_each_bytecode(
            begin,
            lambda _: trainee.step(),
            check,
            files=("activations/offloaded_weights.py",),
            functions=("free_device", "start_load"),
            most=20,
        )
