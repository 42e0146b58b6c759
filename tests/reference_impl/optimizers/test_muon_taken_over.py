# SPDX-License-Identifier: Apache-2.0
"""torch's Muon and the optimizer beside it as one with states off the device: taken over, given back, or refused."""

import copy

import pytest
import torch
from muon_reference import MUON, Experts, flat_optimizers, twins, without_stacks
from optimizer_reference import batches
from optimizer_training import assert_same_weights, train

from reference_impl import (
    OptimizerStateOffloader,
)


def step_all(model, optimizers, data):
    for batch in data:
        model(batch).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_torchs_two_optimizers_are_taken_over_and_given_back(device, fraction):
    model, plain = (without_stacks(each) for each in twins(device, torch.float32))
    two, theirs = flat_optimizers(model), flat_optimizers(plain)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step) for each in (*two, *theirs)]
    data = batches(device.torch_device, 6)
    step_all(model, two, data[:2])
    step_all(plain, theirs, data[:2])
    with OptimizerStateOffloader(two, fraction=fraction, chunk_bytes=4096) as optimizer:
        optimizer.attach(model)
        assert not two[0].state
        assert not two[1].state
        for batch in data[2:4]:
            train(model, optimizer, [batch])
            step_all(plain, theirs, [batch])
            for scheduler in schedulers:
                scheduler.step()
        assert_same_weights(model, plain)
        given_back = [copy.deepcopy(each) for each in optimizer.state_dicts()]
        whole = optimizer.state_dict()
        with pytest.raises(RuntimeError, match="Muon was stepped"):
            two[0].step()
    resumed = flat_optimizers(model)
    for each, saved, their in zip(resumed, given_back, theirs, strict=True):
        each.load_state_dict(saved)
        expected = their.state_dict()
        assert saved["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            for name, value in state.items():
                assert torch.equal(saved["state"][key][name].cpu(), value.cpu()), name
        for ours, group in zip(saved["param_groups"], expected["param_groups"], strict=True):
            assert ours.keys() == group.keys()
    step_all(model, resumed, data[4:5])
    step_all(plain, theirs, data[4:5])
    assert_same_weights(model, plain)
    with OptimizerStateOffloader(flat_optimizers(model), fraction=fraction, chunk_bytes=4096) as again:
        again.load_state_dicts([each.state_dict() for each in theirs])
        train(model, again, data[5:])
        step_all(plain, theirs, data[5:])
        assert_same_weights(model, plain)
        again.load_state_dict(whole)


def test_muon_alone_is_torchs(device):
    model, plain = (torch.nn.Linear(48, 131, bias=False, device=device.torch_device) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.Muon(plain.parameters(), **MUON)
    with OptimizerStateOffloader(torch.optim.Muon(model.parameters(), **MUON), chunk_bytes=768) as optimizer:
        for _ in range(3):
            data = torch.randn(5, 48, device=device.torch_device)
            for net, each in ((model, optimizer), (plain, theirs)):
                net(data).square().sum().backward()
                each.step()
                each.zero_grad()
        assert torch.equal(model.weight, plain.weight)
        ours, expected = optimizer.state_dict(), theirs.state_dict()
        assert ours["param_groups"] == expected["param_groups"]
        assert ours["state"].keys() == expected["state"].keys()
        assert torch.equal(ours["state"][0]["momentum_buffer"], expected["state"][0]["momentum_buffer"].cpu())
        theirs.load_state_dict(ours)
        optimizer.load_state_dict(expected)


def test_optimizers_that_are_not_stepped_together_are_refused(device):
    model = without_stacks(Experts().to(device.torch_device))
    muon, adamw = flat_optimizers(model)
    sgd = torch.optim.SGD([model.up.bias], lr=0.1, momentum=0.9, fused=True)
    for given in ([], [muon, adamw, sgd]):
        with pytest.raises(ValueError, match=r"expected torch\.optim\.Muon, one other"):
            OptimizerStateOffloader(given)
    with pytest.raises(ValueError, match="more than one parameter group"):
        OptimizerStateOffloader([muon, muon])
