# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, fresh, train
from optimizer_training import streaming as build

from reference_impl import OptimizerStateOffloader
from reference_impl.device.base import Reached


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("after", [{}, {"fraction": 0.4}, {"offload_masters": False}, {"chunk_bytes": 3072}])
def test_resuming_with_other_options_changes_no_bit(device, tmp_path, dtype, after):
    data = batches(device.torch_device, 5)
    whole, resumed = fresh(device, dtype), fresh(device, dtype)
    with build(whole) as one, build(resumed, hyper={**OPTIONS, "lr": 99.0}, **after) as other:
        one.attach(whole)
        other.attach(resumed)
        train(whole, one, data[:2])
        # Copies of the last step are still in flight here.
        torch.save({"optimizer": one.state_dict(), "model": whole.state_dict()}, tmp_path / "checkpoint.pt")
        train(whole, one, data[2:])
        train(resumed, other, data[:1])
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        train(resumed, other, data[2:])
        assert_same_weights(whole, resumed)
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_plain_adamw_continues_ours_and_the_other_way(device):
    data = batches(device.torch_device, 9)
    model = fresh(device, torch.float32)
    with build(model) as ours:
        train(model, ours, data[:3])
        plain = copy.deepcopy(model)
        theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        theirs.load_state_dict(ours.state_dict())
        train(model, ours, data[3:6])
        train(plain, theirs, data[3:6])
        assert_same_weights(model, plain)
        ours.load_state_dict(theirs.state_dict())
        train(model, ours, data[6:])
        train(plain, theirs, data[6:])
        assert_same_weights(model, plain)


def test_a_wrapped_optimizer_keeps_the_states_that_it_has(device):
    model = fresh(device, torch.float32)
    plain = copy.deepcopy(model)
    data = batches(device.torch_device, 5)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    train(plain, theirs, data)
    begun = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    train(model, begun, data[:2])
    with OptimizerStateOffloader(begun, chunk_bytes=3072) as ours:
        assert not begun.state
        train(model, ours, data[2:])
        assert_same_weights(model, plain)


def test_sgd_without_steps_in_its_states_resumes(device):
    data = batches(device.torch_device, 4)
    model = fresh(device, torch.float32)
    plain = copy.deepcopy(model)
    hyper = {"lr": 1e-2, "momentum": 0.9}
    theirs = torch.optim.SGD(plain.parameters(), fused=True, **hyper)
    train(plain, theirs, data[:2])
    model.load_state_dict(plain.state_dict())
    with OptimizerStateOffloader(torch.optim.SGD(model.parameters(), fused=True, **hyper)) as ours:
        ours.load_state_dict(theirs.state_dict())
        train(model, ours, data[2:])
        train(plain, theirs, data[2:])
        assert_same_weights(model, plain)
        one, other = ours.state_dict(), theirs.state_dict()
        assert one["param_groups"] == other["param_groups"]
        for index, state in one["state"].items():
            assert state.keys() == {"momentum_buffer"}
            assert torch.equal(state["momentum_buffer"], other["state"][index]["momentum_buffer"].cpu())


def test_a_snapshot_does_not_move_with_training(device):
    model = fresh(device)
    data = batches(device.torch_device, 3)
    with build(model, fraction=0.5) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        snapshot = optimizer.state_dict()
        kept = copy.deepcopy(snapshot)
        train(model, optimizer, data[1:])
        torch.testing.assert_close(snapshot, kept, rtol=0, atol=0)


@pytest.mark.parametrize("offload_masters", [True, False])
def test_a_loaded_model_refreshes_masters(device, offload_masters):
    model, other = fresh(device), fresh(device)
    with build(model, fraction=0.5, offload_masters=offload_masters) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, batches(device.torch_device, 2))
        model.load_state_dict(other.state_dict())
        states = optimizer.state_dict()["state"]
        for index, param in enumerate(model.parameters()):
            if index in states:
                assert torch.equal(states[index]["master_param"].to(param), param)


def test_a_foreign_state_dict_is_refused_and_nothing_is_changed(device):
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        before = copy.deepcopy(optimizer.state_dict())
        wrong = copy.deepcopy(before)
        wrong["state"][0]["exp_avg"] = torch.zeros(7)
        with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\] has shape \(7,\)"):
            optimizer.load_state_dict(wrong)
        wrong = copy.deepcopy(before)
        wrong["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(wrong)
        wrong = copy.deepcopy(before)
        wrong["param_groups"][0]["amsgrad"] = True
        with pytest.raises(ValueError, match="amsgrad is True"):
            optimizer.load_state_dict(wrong)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_saving_and_loading_wait_for_each_update_once_however_many_parameters_there_are(monkeypatch):
    waits = {}
    for count in (50, 200):
        params = [torch.nn.Parameter(torch.ones(64)) for _ in range(count)]
        with OptimizerStateOffloader(torch.optim.AdamW(params, fused=True)) as optimizer:
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            waited = [0]

            def wait(_: Reached, waited: list[int] = waited) -> None:
                waited[0] += 1

            monkeypatch.setattr(Reached, "synchronize", wait)
            optimizer.load_state_dict(optimizer.state_dict())
            waits[count] = waited[0]
    assert waits[200] < 5 * waits[50], waits
