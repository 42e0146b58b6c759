# SPDX-License-Identifier: Apache-2.0
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.activations import ActivationOffloader, CheckpointOffloader, LegacyCheckpointOffloader
from reference_impl.activations.attach import find_blocks
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 1024}


def peak_bytes(trainee, device, steps=2):
    with Ledger(device, track=trainee.model.parameters()) as ledger:
        for _ in range(steps):
            trainee.model.zero_grad()
            ledger.reset_peak()
            trainee.loss().backward()
    return ledger.peak_device_bytes


@pytest.mark.parametrize("num_layers", [1, 4])
@pytest.mark.parametrize("keep", [(), ("core_attention",), ("core_attention", "qkv", "gate")])
def test_every_step_is_bitwise_the_same(trainee, num_layers, keep):
    expected = trainee.step()
    with CheckpointOffloader(trainee.model, num_layers=num_layers, keep=keep, **SMALL) as offloader:
        for _ in range(3):
            assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0


def test_lists_of_lists_of_blocks_are_blocks(device):
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for _ in range(3))

        def forward(self, x):
            for stage in self.stages:
                for block in stage:
                    x = block(x).tanh()
            return x

    model = Stages().to(device.torch_device)
    assert list(find_blocks(model)) == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]
    x = torch.randn(32, 64, device=device.torch_device)

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss, *(param.grad for param in model.parameters())]

    expected = step()
    with CheckpointOffloader(model, **SMALL) as offloader:
        assert all(map(torch.equal, step(), expected))
        assert offloader.offloaded_bytes > 0


def test_only_layer_inputs_and_those_of_norm_and_head_move(trainee):
    hidden = trainee.model.embedding(trainee.ids)
    with CheckpointOffloader(trainee.model, min_bytes=2**12) as offloader:
        trainee.step()
        # The CPU's norm saves one result more than its input.
        assert offloader.offloaded_bytes in (6 * hidden.nbytes, 7 * hidden.nbytes)


def test_kept_results_are_saved_on_the_host(trainee):
    with CheckpointOffloader(trainee.model, **SMALL) as offloader:
        trainee.step()
        inputs = offloader.offloaded_bytes
    with CheckpointOffloader(trainee.model, keep=["gate", "up"], **SMALL) as offloader:
        trainee.step()
        tokens = trainee.ids.numel()
        assert offloader.offloaded_bytes - inputs == 4 * 2 * tokens * 176 * 4


def test_kept_results_are_not_computed_again(trainee):
    class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.name() == "aten::mm"
            return func(*args, **(kwargs or {}))

    def products(keep):
        with CheckpointOffloader(trainee.model, keep=keep, **SMALL), CountProducts() as counter:
            trainee.step()
        return counter.count

    assert products(()) - products(("gate", "up", "qkv")) == 4 * 3


def test_memory_is_below_that_of_recomputation(trainee, device):
    trainee.ids = torch.randint(512, (2, 1024), device=device.torch_device)

    class Recomputed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    with CheckpointOffloader(trainee.model, in_flight_bytes=0, **SMALL):
        offloaded = peak_bytes(trainee, device)
    for index, block in enumerate(trainee.model.layers):
        trainee.model.layers[index] = Recomputed(block)
    recomputed = peak_bytes(trainee, device)
    inputs = 2 * 1024 * 64 * 4
    assert offloaded <= recomputed - inputs


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_dropout_is_the_same_in_recomputation(device):
    model = Dropping().to(device.torch_device)
    x = torch.randn(16, 32, device=device.torch_device)

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with CheckpointOffloader(model, min_bytes=1, keep=["0"]):
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_retained_graphs_and_several_micro_batches(trainee):
    def action():
        trainee.model.zero_grad()
        first, second = trainee.loss(), trainee.loss()
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        return [p.grad.clone() for p in trainee.model.parameters()]

    expected = action()
    with CheckpointOffloader(trainee.model, keep=["core_attention"], **SMALL) as offloader:
        assert all(torch.equal(a, b) for a, b in zip(action(), expected, strict=True))
        assert offloader.arena.live_bytes == 0


def test_an_unknown_module_to_keep_is_refused(trainee):
    with pytest.raises(ValueError, match=r"'core_atention' matches no module.*'core_attention'"):
        CheckpointOffloader(trainee.model, keep=["core_atention"])


def test_the_legacy_baseline_is_bitwise_the_same_too(trainee):
    expected = trainee.step()
    with LegacyCheckpointOffloader(trainee.model):
        assert trainee.step() == expected
    assert trainee.step() == expected


class ByKeyword(nn.Module):
    """Calls its layers as many libraries do: everything by keyword, some of it in tuples."""

    def __init__(self, by_keyword):
        super().__init__()
        self.layers = nn.ModuleList(KeywordLayer() for _ in range(3))
        self.by_keyword = by_keyword

    def forward(self, x):
        turn = (x.new_ones(32), 2.0)
        for layer in self.layers:
            x = layer(hidden=x, turn=turn) if self.by_keyword else layer(x, turn)
        return x


class KeywordLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden, turn):
        scale, factor = turn
        return (self.linear(hidden) * scale * factor).tanh()


@pytest.mark.parametrize("by_keyword", [True, False])
def test_inputs_by_keyword_move_too(device, by_keyword):
    model = ByKeyword(by_keyword).to(device.torch_device)
    x = torch.randn(64, 32, device=device.torch_device)

    def gradients():
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with CheckpointOffloader(model, min_bytes=x.nbytes) as offloader:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert offloader.offloaded_bytes == 2 * 3 * x.nbytes


class Failure(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
def test_after_an_error_the_next_step_is_right(trainee, where):
    expected = trainee.step()
    layer, passes = trainee.model.layers[2], []

    def fail(*_):
        passes.append(1)
        if where != "recomputation" or len(passes) == 2:
            raise Failure

    with CheckpointOffloader(trainee.model, keep=["core_attention"], **SMALL) as offloader:
        gate = layer.gate
        register = gate.register_full_backward_hook if where == "backward" else gate.register_forward_hook
        hook = register(fail)
        with pytest.raises(Failure):
            trainee.step()
        hook.remove()
        assert trainee.step() == expected
        assert trainee.step() == expected
        gc.collect()
        assert offloader.arena.live_bytes == 0


def test_a_failed_forward_leaves_no_hook_in_place_while_its_error_is_kept(trainee):
    """torch's checkpoint leaves its own there before torch 2.13, and others would be popped in its place."""

    def fail(*_):
        raise RuntimeError("planted")

    handle = trainee.model.layers[1].register_forward_pre_hook(fail)
    with CheckpointOffloader(trainee.model, keep=["gate"], **SMALL):
        with pytest.raises(RuntimeError, match="planted") as kept:
            trainee.step()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        del kept
    handle.remove()


def test_inputs_that_are_all_too_small_to_leave_are_said_once(trainee):
    with CheckpointOffloader(trainee.model) as offloader:
        with pytest.warns(
            UserWarning, match=r"CheckpointOffloader moves nothing: .* try min_bytes=\d+"
        ) as said:
            trainee.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainee.step()
        assert offloader.offloaded_bytes == 0
    (message,) = [str(each.message) for each in said if "moves nothing" in str(each.message)]
    with CheckpointOffloader(trainee.model, min_bytes=int(message.rsplit("=", 1)[1])) as offloader:
        trainee.step()
        assert offloader.offloaded_bytes > 0


class Remembering(nn.Module):
    """Adds keys to an object that it is given, as attention adds them to a cache."""

    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, x])
        return (x @ cache.keys.T.sin()).sum(1, keepdim=True) + x


class Cache:
    def __init__(self):
        self.keys = torch.ones(3, 8)


class Holder:
    def __init__(self):
        self.cache = Cache()


class RememberingInside(Remembering):
    def forward(self, x, holder):
        return super().forward(x, holder.cache)


def test_a_layer_that_writes_an_object_inside_another_is_told_which(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([RememberingInside(), RememberingInside()])
            self.start = nn.Linear(8, 8)

        def forward(self, x):
            holder, x = Holder(), self.start(x)
            for layer in self.layers:
                x = layer(x, holder)
            return x

    model = Model()
    with (
        CheckpointOffloader(model, min_bytes=1),
        pytest.raises(
            RuntimeError, match=r"was given a Holder, which its first call may have changed.* try Activ"
        ),
    ):
        model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    with ActivationOffloader(model, min_bytes=1):
        model(torch.ones(2, 8)).sum().backward()


class CacheOfLayers:
    """Keys of each layer in an object of a list, as in a cache of Transformers."""

    def __init__(self, prefix):
        self.layers = [Cache() for _ in prefix]
        for layer, keys in zip(self.layers, prefix, strict=True):
            layer.keys = keys

    def get_seq_length(self):
        return len(self.layers[0].keys)


class RememberingAt(Remembering):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x, cache):
        return super().forward(x, cache.layers[self.place])


class RememberingModel(nn.Module):
    """Two layers with trained keys in front of their own, as prefix tuning has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([RememberingAt(0), RememberingAt(1)])
        self.start, self.prefix = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 3, 8))

    def forward(self, x):
        self.cache, x = CacheOfLayers(self.prefix), self.start(x)
        for layer in self.layers:
            x = layer(x, self.cache)
        return x


def test_a_layer_is_computed_again_with_the_cache_of_keys_that_it_was_given(device):
    """Its own are in the cache by then: a model of Transformers has one in training too, unless `use_cache` is off."""

    def gradients():
        model.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        for is_kept in (True, False):
            loss.backward(retain_graph=is_kept)
        return [param.grad.clone() for param in model.parameters()]

    model = RememberingModel()
    expected = gradients()
    assert all(gradient.any() for gradient in expected)
    with CheckpointOffloader(model, min_bytes=1):
        assert all(map(torch.equal, gradients(), expected))
    assert model.cache.get_seq_length() == 5
