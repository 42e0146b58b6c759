"""`optimizer.state`: read and written where states live."""

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import hybrid, train, twins


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
    with hybrid(model, bucket_elements=2**20) as optimizer:
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
