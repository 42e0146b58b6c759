# SPDX-License-Identifier: Apache-2.0
"""Training parked between its calls equals unparked training, to the bit, and its device memory is free."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from small_net import loss_of, net
from torch import nn

from reference_impl import (
    ActivationOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    Streaming,
    TrainableLayerStreamer,
    park,
)
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

THREE_WAYS = {"split": (0.3, 0.4, 0.3), "streaming": Streaming(chunk_bytes=8192)}
OURS = {
    "hybrid": lambda params: HybridDeviceOptimizer(params, lr=1e-2, **THREE_WAYS),
    "hybrid that updates in backward": lambda params: HybridDeviceOptimizer(
        params, lr=1e-2, backward_overlap="update"
    ),
    "hybrid on the device": lambda params: HybridDeviceOptimizer(params, lr=1e-2, offload_fraction=0.0),
    "offloader": lambda params: OptimizerStateOffloader(
        torch.optim.AdamW(params, lr=1e-2, fused=True), fraction=0.5
    ),
}
STOCK = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adafactor": {},
    "Rprop": {},
    "LBFGS": {},
    "Muon": {},
    "SparseAdam": {},
    **{name: {} for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")},
}


@pytest.fixture
def model(device):
    return net(device)


# Muon takes matrices alone, SparseAdam sparse gradients alone.
TRAINS = {
    "Muon": lambda model: [param for param in model.parameters() if param.ndim == 2],
    "SparseAdam": lambda model: [model[0].weight],
}


def test_all_optimizers_of_torch_are_parked():
    optimizers = {
        name
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }
    assert set(STOCK) == optimizers - {"Optimizer"}


class Lookup(nn.Embedding):
    """Rows that a batch names: sparse gradients."""

    def forward(self, batch):
        return super().forward((batch.abs() * 10).long() % self.num_embeddings)


def net_for(name, device):
    if name != "SparseAdam":
        return net(device)
    torch.manual_seed(0)
    return nn.Sequential(Lookup(64, 8, sparse=True)).to(device.torch_device)


def optimizer_of(name, model):
    if name not in OURS:
        params = TRAINS.get(name, nn.Module.parameters)(model)
        return getattr(torch.optim, name)(params, lr=1e-2, **STOCK[name])
    optimizer = OURS[name](model.parameters())
    optimizer.attach(model)
    return optimizer


def trained(device, name, away):
    """Losses and the states after four steps, with `away(model, optimizer)` behind each call."""
    model = net_for(name, device)
    optimizer = optimizer_of(name, model)
    losses, pause = [], away(model, optimizer)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if name == "LBFGS":
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            pause()
            optimizer.step()
        pause()
    states = [model.state_dict(), optimizer.state_dict()["state"]]
    pause.__self__.close() if hasattr(pause, "__self__") else None
    if name in OURS:
        optimizer.close()
    return losses, copy.deepcopy(states)


def never(model, optimizer):
    return lambda: None


def always(model, optimizer):
    parked = park(model, optimizer)

    def away(self):
        with self:
            assert self.status == "parked"
            assert not any(param.untyped_storage().nbytes() for param in model.parameters())

    return away.__get__(parked)


def assert_same(mine, theirs):
    assert mine[0] == theirs[0]
    torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", [*STOCK, *OURS])
def test_training_is_the_same(device, name):
    assert_same(trained(device, name, always), trained(device, name, never))


def bytes_on_the_device(model):
    return sum(each.untyped_storage().nbytes() for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", ["AdamW", "hybrid", "hybrid on the device", "offloader"])
def test_no_training_memory_stays_on_the_device(device, name):
    with Ledger(device) as ledger:
        empty_bytes = ledger.device_bytes
        model = net(device)
        optimizer = optimizer_of(name, model)
        loss_of(model, 0).backward()
        optimizer.step()
        parked = park(model, optimizer)
        report = parked.park()
        assert bytes_on_the_device(model) == 0 < report.parked_bytes["weights"]
        assert report.copied_bytes == sum(report.parked_bytes.values())
        # Counters of the optimizer's own, a number each.
        assert ledger.device_bytes - empty_bytes < 2048
        parked.close()
        if name in OURS:
            optimizer.close()


def test_tensors_stay_the_same_objects(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    weight = model[0][0].weight
    row, state = weight.detach()[3], optimizer.state[weight]
    moment, group = state["exp_avg"], optimizer.param_groups[0]
    heard = []
    weight.register_hook(heard.append)
    before = (weight._version, row.clone(), weight.grad, type(weight), moment._version)
    with park(model, optimizer):
        assert row.untyped_storage().nbytes() == 0
    assert model[0][0].weight is weight is group["params"][0]
    assert optimizer.state[weight]["exp_avg"] is moment
    assert (weight._version, weight.grad, type(weight)) == (before[0], before[2], before[3])
    assert moment._version == before[4]
    assert torch.equal(row, before[1])
    assert row.untyped_storage()._cdata == weight.untyped_storage()._cdata
    loss_of(model, 1).backward()
    assert heard


def test_what_shares_memory_is_moved_once(device):
    flat = torch.randn(3 * 64 * 64, device=device.torch_device)
    layers = [nn.Linear(64, 64, bias=False, device=device.torch_device) for _ in range(4)]
    for number in range(3):
        layers[number].weight.data = flat[number * 4096 : (number + 1) * 4096].view(64, 64)
    layers[3].weight = layers[0].weight
    model, before = nn.Sequential(*layers), flat.clone()
    with park(model) as parked:
        assert parked.report.parked_bytes == {"weights": flat.nbytes}
        assert parked.report.copied_bytes == flat.nbytes
        with pytest.raises(RuntimeError, match=r"restore\(\)"):
            model(torch.ones(1, 64, device=device.torch_device))
    assert torch.equal(flat, before)
    parked.close()


REFUSED = {
    "forward": lambda model, optimizer: loss_of(model, 0),
    "forward of a part": lambda model, optimizer: model[0](torch.ones(1, 64)),
    "a weight": lambda model, optimizer: model[0][0].weight.sum(),
    "a gradient": lambda model, optimizer: model[0][0].weight.grad.sum(),
    "a state": lambda model, optimizer: next(iter(optimizer.state.values()))["exp_avg"] + 1,
    "step": lambda model, optimizer: optimizer.step(),
    "the model's state": lambda model, optimizer: model.state_dict(),
    "a load of the model": lambda model, optimizer: model.load_state_dict(net(Device.of("cpu")).state_dict()),
    "the optimizer's state": lambda model, optimizer: optimizer.state_dict(),
    "clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("action", REFUSED)
def test_parked_training_refuses_by_name(model, action):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    with park(model, optimizer), pytest.raises(RuntimeError, match=r"try restore\(\)"):
        REFUSED[action](model, optimizer)
    # The remedy.
    loss_of(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_refuse_too(model, name):
    optimizer = optimizer_of(name, model)
    loss_of(model, 0).backward()
    optimizer.step()
    with park(model, optimizer) as parked:
        for action in (optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match=r"restore\(\)"):
                action()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    parked.close()
    optimizer.close()


def test_parts(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    parked = park(model, optimizer)
    parked.park(weights=False)
    assert parked.parked_kinds == ("gradients", "states")
    loss_of(model, 1)
    with pytest.raises(RuntimeError, match=r"step\(\) came while"):
        optimizer.step()
    parked.park()
    assert parked.parked_kinds == ("weights", "gradients", "states")
    parked.restore("weights")
    assert parked.status == "parked"
    loss_of(model, 1)
    model.state_dict()
    with pytest.raises(RuntimeError, match=r"step\(\) came while"):
        optimizer.step()
    parked.restore()
    assert parked.status == "present"
    optimizer.step()
    parked.close()


def test_dropped_gradients_are_not_moved(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    with park(model, optimizer, gradients="drop") as parked:
        assert "gradients" not in parked.report.parked_bytes
    assert all(param.grad is None for param in model.parameters())


BAD = {
    "twice": lambda model, parked: (parked.park(), parked.park()),
    "restored before": lambda model, parked: parked.restore(),
    "closed": lambda model, parked: (parked.close(), parked.park()),
    "nothing of it": lambda model, parked: (parked.park(weights=False), parked.restore("weights")),
    "read when closed": lambda model, parked: (parked.close(), parked.state_dict()),
}


@pytest.mark.parametrize("action", BAD)
def test_calls_out_of_order_say_what_to_do(model, action):
    parked = park(model, torch.optim.AdamW(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"expected .*; try"):
        BAD[action](model, parked)
    parked.close()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_bad_arguments(model, device):
    with pytest.raises(ValueError, match="trains no parameter of the model"):
        park(model, torch.optim.AdamW(net(device)[0].parameters()))
    with pytest.raises(ValueError, match="expected 'keep' or 'drop'"):
        park(model, gradients="forget")
    with pytest.raises(ValueError, match="expected a module"):
        park([])
    optimizer = HybridDeviceOptimizer(model.parameters())
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        park(model, optimizer)
    with pytest.raises(ValueError, match="expected some of weights"):
        park(model).restore("optimizer")


def test_a_parameter_added_meanwhile_is_left_alone(model, device):
    parked = park(model)
    parked.park()
    model.register_parameter("late", nn.Parameter(torch.ones(4, device=device.torch_device)))
    parked.restore()
    loss_of(model, 0)
    with parked:
        assert model.late.untyped_storage().nbytes() == 0
    assert model.late.sum().item() == 4
    parked.close()


def test_what_cannot_leave_is_named_before_anything_moves():
    numpy = pytest.importorskip("numpy", reason="its memory does not resize")
    model = net(Device.of("cpu"))
    kept = torch.from_numpy(numpy.ones(64, dtype="float32"))
    model[0][0].bias = nn.Parameter(kept)
    with pytest.raises(RuntimeError, match=r"0\.0\.bias: its storage does not resize.*try strict=False"):
        park(model).park()
    assert loss_of(model, 0).isfinite()
    with park(model, strict=False) as parked:
        assert list(parked.report.left) == ["0.0.bias"]
        assert kept.untyped_storage().nbytes()
        with pytest.raises(RuntimeError, match="parked"):
            loss_of(model, 0)
    assert loss_of(model, 0).isfinite()
    parked.close()


def test_two_networks_and_their_optimizers(device):
    first, second = net(device), net(device)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (first, second)]
    loss_of(second, 0).backward()
    with park([first, second], optimizers):
        for each in (first, second):
            with pytest.raises(RuntimeError, match="parked"):
                loss_of(each, 0)
    optimizers[1].step()


def test_masters_beside_the_model_are_states(model):
    masters = [param.detach().double().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with park(model, optimizer) as parked:
        assert parked.report.parked_bytes["states"] == sum(master.nbytes for master in masters)
        with pytest.raises(RuntimeError, match="parameter 0 of an optimizer is not on the device"):
            masters[0].sum()
    assert masters[0].sum().isfinite()


def test_what_else_is_given(device):
    model = net(device)
    ema = net(device)
    extra = {"rewards": [torch.ones(100, device=device.torch_device)]}
    with park(model, also=[ema, extra]) as parked:
        assert parked.report.parked_bytes["extra"] == bytes_of(ema) + 400
        assert extra["rewards"][0].untyped_storage().nbytes() == 0
    assert extra["rewards"][0].sum().item() == 100


def bytes_of(module):
    return sum(each.nbytes for each in module.state_dict().values())


def decoder(device):
    torch.manual_seed(0)
    return Decoder(DecoderShape(layers=3)).to(device.torch_device)


def ids(device, step=0):
    return torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(step)).to(device.torch_device)


def steps(model, optimizer, device, pause):
    """The losses of three steps, each with a pause behind it."""
    losses = []
    for step in range(3):
        loss = decoder_loss(model(ids(device, step)), ids(device, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with pause:
            pass
    return losses


def test_frozen_layers_that_stream(device):
    losses = []
    for pauses in (False, True):
        model = decoder(device)
        add_lora(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with FrozenLayerStreamer(model, resident_layers=1, prefetch=1) as streamer:
            parked = park(model, optimizer, also=[streamer])
            losses.append(steps(model, optimizer, device, parked if pauses else nullcontext()))
            parked.close()
    assert losses[0] == losses[1]


def test_trained_layers_that_stream_and_offloaded_activations(device):
    losses = []
    for pauses, offloads in itertools.product((False, True), repeat=2):
        model = decoder(Device.of("cpu"))
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with TrainableLayerStreamer(
            model, wrapped, resident_layers=1, device=device.torch_device
        ) as streamer:
            optimizer = streamer.optimizer
            activations = ActivationOffloader(model, num_layers=1, min_bytes=1) if offloads else None
            parked = park(model, optimizer, also=[streamer])
            losses.append(steps(model, optimizer, device, parked if pauses else nullcontext()))
            parked.close()
            if activations is not None:
                activations.close()
    assert all(each == losses[0] for each in losses)


def test_layers_that_stream_need_all_of_their_training_back(device):
    """Their memory on the device is reached through the optimizer, and no part of the weights."""
    model = decoder(device)
    wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with TrainableLayerStreamer(model, wrapped, device=device.torch_device) as streamer:
        parked = park(model, streamer.optimizer)
        expected = model(ids(device)).sum().item()
        parked.park(weights=False)
        with pytest.raises(RuntimeError, match=r"is not on the device; training is parked: try restore\(\)"):
            model(ids(device))
        parked.restore()
        assert model(ids(device)).sum().item() == expected
        parked.close()


def test_a_model_is_copied_without_its_guards(model):
    parked = park(model, torch.optim.AdamW(model.parameters()))
    copied = copy.deepcopy(model)
    with parked:
        loss_of(copied, 0).backward()
    parked.close()


def test_nobody_loses_parked_training(model):
    before = copy.deepcopy(model.state_dict())
    park(model).park()
    with pytest.raises(RuntimeError, match="parked"):
        loss_of(model, 0)
    from reference_impl.parking import parked as room

    (left,) = [each for each in room._parked if each._models == [model]]
    left.close()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
