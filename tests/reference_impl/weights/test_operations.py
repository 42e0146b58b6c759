# SPDX-License-Identifier: Apache-2.0
"""Other operations on a model while its weights stream: saved, loaded, moved, merged, changed, closed."""

import copy
import io

import pytest
import torch
from lora_trainee import Trainee
from torch import nn
from torch.nn.utils import parametrize

from reference_impl.weights import FrozenLayerStreamer
from reference_impl.weights.block import StreamedBlock


@pytest.fixture
def streamer(trainee):
    with FrozenLayerStreamer(trainee.model, prefetch=1, resident_layers=1) as streamer:
        yield streamer


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name].cpu(), right[name].cpu()) for name in left)


def test_state_dict(trainee):
    expected = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        trainee.step()
        state = trainee.model.state_dict()
        assert same(state, expected)
        assert same(
            trainee.layers[4].state_dict(),
            {
                name.removeprefix("layers.4."): value
                for name, value in expected.items()
                if name.startswith("layers.4.")
            },
        )
        file = io.BytesIO()
        torch.save(trainee.layers[4].state_dict(), file)
    assert len(file.getvalue()) < 2 * sum(p.nbytes for p in trainee.layers[4].parameters())
    assert same(state, expected)


class Scaled(torch.Tensor):
    """A wrapper subclass like those of quantisation libraries: integers and a scale."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scale.dtype, device=integers.device
        )

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        args = [arg.integers * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def test_weights_packed_into_a_subclass(device):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            packed = Scaled(torch.randint(-8, 8, (128, 128), dtype=torch.int8), torch.rand(128, 1) / 50)
            self.weight = nn.Parameter(packed, requires_grad=False)

        def forward(self, x):
            return torch.mm(x, self.weight)

    model = nn.ModuleList(Layer() for _ in range(3))
    for layer in model:
        layer.weight.integers, layer.weight.scale = (
            layer.weight.integers.to(device.torch_device),
            layer.weight.scale.to(device.torch_device),
        )
    x = torch.randn(2, 128, device=device.torch_device, requires_grad=True)

    def gradient():
        y = x
        for layer in model:
            y = layer(y)
        return torch.autograd.grad(y.sum(), x)[0]

    expected, weight = gradient(), model[1].weight.integers.clone()
    with FrozenLayerStreamer(model, prefetch=0, device=device.torch_device) as streamer:
        assert streamer.report.streamed_bytes == 3 * 128 * 128
        assert torch.equal(gradient(), expected)
        state = model.state_dict()
    assert torch.equal(state["1.weight"].integers, weight.cpu())
    assert torch.equal(gradient(), expected)


def test_load_state_dict(trainee, streamer):
    expected = trainee.step()
    state = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    other = {name: value + 1 for name, value in state.items()}
    trainee.model.load_state_dict(other)
    assert same(trainee.model.state_dict(), other)
    assert not torch.equal(trainee.step().loss, expected.loss)
    trainee.model.load_state_dict(state)
    assert trainee.step() == expected


@pytest.mark.parametrize("assign", [False, True])
def test_loading_streams_again(trainee, streamer, assign, device):
    state = {
        name: value.clone().to(device.torch_device) for name, value in trainee.model.state_dict().items()
    }
    for parameter in trainee.model.parameters():
        parameter.grad = None
    before = streamer.report.streamed_bytes
    frozen = [n for n, p in trainee.model.named_parameters() if not p.requires_grad]
    trainee.model.load_state_dict(state, assign=assign)
    for name in frozen:
        trainee.model.get_parameter(name).requires_grad_(False)
    assert streamer.report.streamed_bytes == before
    trainee.step()


def test_to_another_dtype_and_back(trainee, streamer):
    trainee.model.to(torch.bfloat16)
    assert trainee.layers[3].qkv.base.weight.dtype == torch.bfloat16
    streamed = trainee.step()
    assert streamer.report.streamed_bytes > 0
    streamer.close()
    assert trainee.step() == streamed


def test_to_the_same_device(trainee, streamer, device):
    expected = trainee.step()
    trainee.model.to(device.torch_device)
    assert trainee.step() == expected


@pytest.mark.cuda
def test_to_the_cpu_and_back(trainee, streamer, device):
    if not device.is_accelerator:
        pytest.skip("on the CPU twin there is no other device")
    expected = trainee.step()
    trainee.model.cpu()
    assert {p.device.type for p in trainee.model.parameters()} == {"cpu"}
    assert streamer.report.streamed_bytes == 0
    trainee.model.cuda()
    assert streamer.report.streamed_bytes > 0
    assert trainee.step() == expected


class MergingLinear(nn.Module):
    """As peft's LoRA layer changes its base weight."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.delta = nn.Parameter(torch.ones_like(base.weight))
        self.sign = 0

    def merge(self):
        self.base_layer.weight.data += self.delta
        self.sign = 1

    def unmerge(self):
        self.base_layer.weight.data = self.base_layer.weight.data - self.delta
        self.sign = 0

    def forward(self, x):
        return self.base_layer(x) + (1 - self.sign) * nn.functional.linear(x, self.delta)


def test_merging_and_unmerging_adapters(device):
    model = nn.ModuleList(MergingLinear(nn.Linear(64, 64)) for _ in range(4)).to(device.torch_device)
    for layer in model:
        layer.base_layer.requires_grad_(False)
    start = model[2].base_layer.weight.detach().clone()
    merged = start + model[2].delta.detach()
    with FrozenLayerStreamer(model, prefetch=0) as streamer:
        for layer in model:
            layer.merge()
        assert torch.equal(model.state_dict()["2.base_layer.weight"], merged.cpu())
        assert streamer.report.streamed_bytes == 4 * 64 * 64 * 4
        for layer in model:
            layer.unmerge()
    assert torch.equal(model[2].base_layer.weight, merged - model[2].delta)
    assert "merge" not in vars(model[2])


def test_changing_weights_where_it_is_allowed(trainee, streamer):
    weight = trainee.layers[2].gate.base.weight
    with streamer.gathered(trainee.layers[2]):
        before = weight.detach().clone()
        with torch.no_grad(), streamer.gathered():
            weight.mul_(2)
    trainee.step()
    assert torch.equal(trainee.model.state_dict()["layers.2.gate.base.weight"], before.cpu() * 2)


def test_a_changed_weight_is_named(trainee, streamer):
    trainee.step()
    loaded = next(layer for layer in trainee.layers if layer.gate.base.weight.untyped_storage().nbytes() > 0)
    with torch.no_grad():
        loaded.gate.base.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"layers\.\d\.gate\.base\.weight has changed"):
        trainee.step()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_changed_weight_is_saved_and_stays_when_it_is_closed(trainee, is_pinned):
    limit = None if is_pinned else 2 * trainee.layer_bytes
    with FrozenLayerStreamer(trainee.model, prefetch=1, host_limit_bytes=limit):
        trainee.step()
        index = next(
            i for i, layer in enumerate(trainee.layers) if layer.gate.base.weight.untyped_storage().nbytes()
        )
        weight = trainee.layers[index].gate.base.weight
        with torch.no_grad():
            weight[3] += 1
        expected = weight.clone()
        state = trainee.model.state_dict()
        name = f"layers.{index}.gate.base.weight"
        assert torch.equal(state[name], expected.cpu())
        assert state[name].untyped_storage().nbytes() == expected.nbytes
    assert torch.equal(weight, expected)
    assert torch.equal(state[name], expected.cpu())


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_weight_may_be_parametrized_for_the_time_of_a_forward(trainee):
    """As under peft's adapters of experts: to begin with, torch sets the weight to the memory that it has."""
    bases = [layer.gate.base for layer in trainee.layers]
    for base in bases:
        base.register_forward_pre_hook(
            lambda module, _: parametrize.register_parametrization(module, "weight", Halved()) and None
        )
        base.register_forward_hook(
            lambda module, *_: (
                parametrize.remove_parametrizations(module, "weight", leave_parametrized=False) and None
            )
        )
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        assert trainee.step() == expected
        assert trainee.step() == expected
    assert trainee.step() == expected
    assert not any("set_" in vars(base.weight) for base in bases)


@pytest.mark.parametrize(
    "change",
    [lambda weight: weight + 1, lambda weight: weight.reshape(weight.T.shape).T],
    ids=["memory", "layout"],
)
def test_a_weight_that_is_set_to_something_else_is_named(trainee, streamer, change):
    trainee.step()
    loaded = next(layer for layer in trainee.layers if layer.gate.base.weight.untyped_storage().nbytes() > 0)
    weight = loaded.gate.base.weight
    with torch.no_grad():
        changed = change(weight).clone()
        weight.set_(change(weight))
    with pytest.raises(RuntimeError, match=r"layers\.\d\.gate\.base\.weight has changed"):
        trainee.step()
    streamer.close()
    assert torch.equal(weight, changed)


def test_an_unfrozen_weight_is_named(trainee, streamer):
    trainee.layers[3].up.base.weight.requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"layers\.3\.up\.base\.weight has changed, or been frozen or unfrozen"
    ):
        trainee.step()


def test_unfreezing_where_it_is_allowed(trainee, streamer):
    with streamer.gathered():
        trainee.layers[3].up.base.weight.requires_grad_()
    assert "layers.3.up.base.weight" in trainee.step().gradients


def test_a_deep_copy_is_an_ordinary_model(trainee, streamer):
    expected = trainee.step()
    before = streamer.report.streamed_bytes
    twin = copy.deepcopy(trainee.model)
    assert streamer.report.streamed_bytes == before
    assert trainee.step() == expected
    assert Trainee(twin, trainee.ids).step() == expected
    assert not any(m._forward_hooks or "merge" in vars(m) or "_apply" in vars(m) for m in twin.modules())
    streamer.close()
    assert Trainee(twin, trainee.ids).step() == expected


def test_no_room_to_gather(trainee, streamer, monkeypatch):
    expected = trainee.step()
    restore, calls = StreamedBlock.restore, []

    def full(self, *, to_origin):
        calls.append(self)
        if len(calls) == 3:
            raise MemoryError("planted")
        restore(self, to_origin=to_origin)

    monkeypatch.setattr(StreamedBlock, "restore", full)
    with pytest.raises(MemoryError, match="planted"), streamer.gathered():
        pytest.fail("there was no room")
    monkeypatch.undo()
    assert streamer.report.streamed_bytes > 0
    assert trainee.step() == expected


def test_closing_between_forward_and_backward(trainee):
    expected = trainee.step()
    trainee.model.zero_grad()
    with FrozenLayerStreamer(trainee.model, prefetch=0):
        loss = trainee.loss()
    loss.backward()
    assert all(
        torch.equal(p.grad, expected.gradients[n])
        for n, p in trainee.model.named_parameters()
        if p.grad is not None
    )


def test_unfreezing_a_whole_layer(trainee, streamer):
    trainee.step()
    with streamer.gathered():
        for layer in (trainee.layers[0], trainee.layers[5]):
            layer.requires_grad_()
    for _ in range(2):
        assert "layers.0.qkv.base.weight" in trainee.step().gradients


def test_close_leaves_no_trace(trainee):
    before = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    attributes = [set(vars(module)) for module in trainee.model.modules()]
    streamer = FrozenLayerStreamer(trainee.model)
    trainee.step()
    streamer.close()
    streamer.close()
    assert same(trainee.model.state_dict(), before)
    assert [set(vars(module)) for module in trainee.model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainee.model.modules())
    sizes = [p.untyped_storage().nbytes() for p in trainee.model.parameters()]
    assert sizes == [p.nbytes for p in trainee.model.parameters()]


def test_a_load_that_somebody_elses_hook_has_ended_leaves_no_weight_on_the_device(trainee, streamer):
    def theirs(*_):
        raise LookupError("theirs")

    block = trainee.layers[4]
    block.register_load_state_dict_pre_hook(theirs)
    with pytest.raises(LookupError, match="theirs"):
        trainee.model.load_state_dict(trainee.model.state_dict())
    assert streamer.is_gathered(block)
    trainee.step()
    assert not streamer.is_gathered(block)


def test_closing_inside_gathered_takes_nothing_again(trainee):
    expected = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    streamer = FrozenLayerStreamer(trainee.model, prefetch=1)
    with streamer.gathered():
        streamer.close()
    trainee.model(trainee.ids)
    assert same(trainee.model.state_dict(), expected)
