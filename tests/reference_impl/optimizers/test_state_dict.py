# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, assert_same_weights, fresh, train
from optimizer_training import hybrid as build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (1.0, 0.4), (0.4, 1.0), (0.0, 0.7), (0.7, 0.0)])
def test_resuming_at_another_fraction_changes_no_bit(device, tmp_path, dtype, before, after):
    if device.is_accelerator and before != after:
        pytest.skip("CPU and GPU kernels round differently, so a share that moves does not stay bitwise")
    data = batches(device.torch_device, 5)
    whole, resumed = fresh(device, dtype), fresh(device, dtype)
    with (
        build(whole, offload_fraction=before) as one,
        build(resumed, offload_fraction=after, lr=99.0) as other,
    ):
        train(whole, one, data[:2])
        torch.save({"model": whole.state_dict(), "optimizer": one.state_dict()}, tmp_path / "checkpoint.pt")
        train(whole, one, data[2:])
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        train(resumed, other, data[2:])
        assert_same_weights(whole, resumed)
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_plain_adamw_continues_ours_and_the_other_way(device, fraction):
    data = batches(device.torch_device, 9)
    model = fresh(device, torch.float32)
    with build(model, offload_fraction=fraction) as ours:
        train(model, ours, data[:3])
        plain = copy.deepcopy(model)
        theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        theirs.load_state_dict(ours.state_dict())
        train(model, ours, data[3:6])
        train(plain, theirs, data[3:6])
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
        ours.load_state_dict(theirs.state_dict())
        model.load_state_dict(plain.state_dict())
        ours.refresh_masters()
        train(model, ours, data[6:])
        train(plain, theirs, data[6:])
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_the_layout_is_that_of_adamw(device):
    model = fresh(device, torch.float32)
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    data = batches(device.torch_device, 1)
    train(plain, theirs, data)
    with build(model, offload_fraction=0.5) as ours:
        train(model, ours, data)
        one, other = ours.state_dict(), theirs.state_dict()
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert {k: v.shape for k, v in one["state"][index].items()} == {k: v.shape for k, v in state.items()}
    assert one["param_groups"][0]["params"] == other["param_groups"][0]["params"]


def test_a_snapshot_does_not_move_with_training(device):
    model = fresh(device)
    data = batches(device.torch_device, 3)
    with build(model, offload_fraction=0.5) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        snapshot = optimizer.state_dict()
        kept = copy.deepcopy(snapshot)
        train(model, optimizer, data[1:])
        torch.testing.assert_close(snapshot, kept, rtol=0, atol=0)


def test_a_checkpoint_without_masters_takes_them_from_the_model(device):
    model, plain = fresh(device), fresh(device)
    data = batches(device.torch_device, 2)
    reference = MasterAdamW(plain, on_cpu=True, **OPTIONS)
    with build(model) as optimizer:
        state = optimizer.state_dict()
        train(model, optimizer, data[:1])
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(state)
        train(model, optimizer, data[1:])
    train(plain, reference, data[1:])
    assert_same_weights(model, plain)


def test_a_foreign_state_dict_is_refused_and_nothing_is_changed(device):
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        before = copy.deepcopy(optimizer.state_dict())
        wrong = copy.deepcopy(before)
        wrong["state"][0]["exp_avg"] = torch.zeros(7)
        with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\] has shape \(7,\)"):
            optimizer.load_state_dict(wrong)
        wrong["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="groups of"):
            optimizer.load_state_dict(wrong)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_copies_are_refused_with_the_way_to_do_it(device):
    with build(fresh(device)) as optimizer, pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
