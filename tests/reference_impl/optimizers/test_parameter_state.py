"""`optimizer.state`: read and written where states live."""

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import hold_updates, hybrid, train, twins
from torch import nn

from reference_impl import CpuUpdate
from reference_impl.optimizers.shares import Shares


@pytest.fixture(params=[0.0, 0.5, 1.0])
def trained(request, device):
    model, _ = twins(device)
    with hybrid(model, offload_fraction=request.param) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, batches(device.torch_device, 2))
        yield model, optimizer


def test_it_lists_what_a_state_dict_has(trained):
    model, optimizer = trained
    params = list(model.parameters())
    packed = optimizer.state_dict()["state"]
    assert len(optimizer.state) == len(packed)
    for index, state in packed.items():
        live = optimizer.state[params[index]]
        assert list(live) == list(state)
        assert len(live) == len(state)
        for name, value in state.items():
            assert torch.equal(live[name].cpu(), value.cpu())
    assert params[-1] not in optimizer.state
    assert model.first.weight in optimizer.state


def test_nothing_is_listed_before_the_first_step(device):
    model, _ = twins(device)
    with hybrid(model) as optimizer:
        assert not optimizer.state
        assert optimizer.state_dict()["state"] == {}
        assert optimizer.state[model.first.weight]["step"] == 0


def test_assigning_writes_all_parts(trained):
    model, optimizer = trained
    weight = model.first.weight
    optimizer.state[weight]["exp_avg"] = torch.full((131, 48), 0.5)
    optimizer.state[weight]["step"] = 7
    assert torch.equal(optimizer.state[weight]["exp_avg"].cpu(), torch.full((131, 48), 0.5))
    index = [param is weight for param in model.parameters()].index(True)
    packed = optimizer.state_dict()["state"][index]
    assert torch.equal(packed["exp_avg"].cpu(), torch.full((131, 48), 0.5))
    assert packed["step"] == 7


def test_a_state_in_one_place_is_a_view(device):
    model, _ = twins(device)
    with hybrid(model, cpu=CpuUpdate(bucket_elements=2**20)) as optimizer:
        state = optimizer.state[model.first.weight]
        state["exp_avg_sq"].fill_(2.0)
        assert optimizer.state[model.first.weight]["exp_avg_sq"].min() == 2


def test_wrong_names_and_shapes_are_refused(trained):
    model, optimizer = trained
    state = optimizer.state[model.first.weight]
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        state["max_exp_avg_sq"]
    with pytest.raises(RuntimeError, match="expand"):
        state["exp_avg"] = torch.zeros(5, 5)


def test_a_checkpoint_of_amsgrad_is_refused(device):
    model, plain = twins(device, torch.float32)
    theirs = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    with hybrid(model) as optimizer, pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(theirs.state_dict())


def test_groups_of_an_older_checkpoint_are_completed(device):
    model, _ = twins(device)
    with hybrid(model) as optimizer:
        saved = optimizer.state_dict()
        for name in ("maximize", "eps"):
            del saved["param_groups"][0][name]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["maximize"] is False
        train(model, optimizer, batches(device.torch_device, 1))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_looking_up_one_parameter_waits_for_no_other(device, fraction, monkeypatch):
    """While another parameter's update is held, a parameter that has taken a step is found."""
    params = [nn.Parameter(torch.zeros(640, device=device.torch_device)) for _ in range(4)]
    with hybrid(params, offload_fraction=fraction, cpu=CpuUpdate(bucket_elements=640)) as optimizer:
        optimizer.attach(nn.ParameterList(params))
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert params[0] in optimizer.state
        assert params[1] not in optimizer.state
        optimizer.zero_grad()
        gate = hold_updates(monkeypatch)
        params[3].grad = torch.ones_like(params[3])
        optimizer.step()
        assert params[0] in optimizer.state
        assert params[1] not in optimizer.state
        gate.set()
        assert params[3] in optimizer.state
        assert list(optimizer.state) == [params[0], params[3]]


@pytest.mark.parametrize("split", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (0.2, 0.5, 0.3)], ids=str)
def test_looking_up_one_parameter_reads_one_counter(device, split, monkeypatch):
    params = [nn.Parameter(torch.zeros(64, device=device.torch_device)) for _ in range(100)]
    counters, steps = [], Shares.steps
    monkeypatch.setattr(
        Shares, "steps", lambda shares, member: (counters.append(member), steps(shares, member))[1]
    )
    with hybrid(params, split=split) as optimizer:
        for param in params[:60]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        for looked_up, found in ((params[0], True), (params[99], False), (torch.zeros(64), False)):
            counters.clear()
            assert (looked_up in optimizer.state) is found
            assert len(counters) == (looked_up in optimizer.members)
        assert "lr" not in optimizer.state
        counters.clear()
        assert len(optimizer.state) == 60
        assert len(counters) == 100
        assert all(one is other for one, other in zip(optimizer.state, params[:60], strict=True))
