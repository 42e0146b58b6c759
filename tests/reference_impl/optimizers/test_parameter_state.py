# SPDX-License-Identifier: Apache-2.0
"""`optimizer.state`: read and written where states live."""

import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import (
    OPTIONS,
    assert_same_weights,
    fresh,
    hold_updates,
    hybrid,
    streaming,
    train,
    twins,
)
from torch import nn

from reference_impl import CpuUpdate, Streaming, TrainableLayerStreamer
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


def _in_place(state):
    state.mul_(0.5)


def _of_data(state):
    state.data.zero_()


def _of_a_part(state):
    state.view(-1)[3:9] = 0.25


def _by_foreach(state):
    torch._foreach_mul_([state], 0.5)


def _into_out(state):
    torch.mul(state, 0.5, out=state)


@pytest.mark.parametrize("write", [_in_place, _of_data, _of_a_part, _by_foreach, _into_out])
@pytest.mark.parametrize(
    "build",
    [
        lambda model: hybrid(model),
        lambda model: hybrid(model, offload_fraction=0.5),
        lambda model: hybrid(model, split=(0.3, 0.4, 0.3)),
        lambda model: streaming(model),
    ],
    ids=["on the CPU", "half on the CPU", "three ways", "streamed"],
)
def test_states_that_are_written_into_are_those_of_the_next_step(device, build, write):
    """As ReLoRA, or whoever revives dead neurons, resets moments."""
    if device.is_accelerator:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")

    def trained(make):
        model = fresh(device, torch.float32)
        optimizer = make(model)
        data = batches(device.torch_device, 5)
        train(model, optimizer, data[:1])
        # Somebody may have asked a step ago.
        kept = {
            param: dict(optimizer.state[param]) for param in model.parameters() if param in optimizer.state
        }
        train(model, optimizer, data[1:3])
        for states in kept.values():
            write(states["exp_avg"])
            write(states["exp_avg_sq"])
            states["step"].add_(2)
        train(model, optimizer, data[3:])
        if hasattr(optimizer, "close"):
            optimizer.close()
        return model

    assert_same_weights(
        trained(build), trained(lambda m: torch.optim.AdamW(m.parameters(), fused=True, **OPTIONS))
    )


def test_a_state_that_streams_is_a_plain_tensor_to_whoever_copies_or_saves_it(device, tmp_path):
    model = fresh(device)
    with streaming(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        state = optimizer.state[model.first.weight]["exp_avg"]
        torch.save({"state": state}, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
        for copied in (loaded, copy.deepcopy(state), state.clone(), state + 0):
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, state)


@pytest.mark.parametrize("chunk_bytes", [768, 2048])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_state_read_behind_a_step_finishes_what_streams_as_a_forward_would(device, place, chunk_bytes):
    """Weights outside of the blocks are on their way then, and whoever makes them does not wait for them."""

    def made():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).to(device.torch_device)

    model, plain = made(), made()
    options = {"prefetch": 0, "layers": list(model)[1:5], "streaming": Streaming(chunk_bytes=chunk_bytes)}
    adamw, given = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (plain, model))
    with TrainableLayerStreamer(model, given, **options) as streamer:
        for batch in torch.ones(3, 4, 16, device=device.torch_device):
            for each, optimizer in ((model, streamer.optimizer), (plain, adamw)):
                each(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.state[each[place].weight]["exp_avg"][:3].zero_()
            found, expected = (
                optimizer.state[each[place].weight]["exp_avg"]
                for each, optimizer in ((model, streamer.optimizer), (plain, adamw))
            )
            assert torch.equal(found.cpu(), expected.cpu())
    assert_same_weights(model, plain)
