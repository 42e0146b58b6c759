# SPDX-License-Identifier: Apache-2.0
"""Training with streamed weights gives the same bits, whatever the order of visits."""

import pytest
import torch
from one_step import run_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.weights import FrozenLayerStreamer


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("resident_layers", [0, 1, 3, 6])
def test_a_step_is_bitwise_the_same(trainee, prefetch, resident_layers):
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, resident_layers=resident_layers, prefetch=prefetch):
        for _ in range(3):
            assert trainee.step() == expected
    assert trainee.step() == expected


def test_layer_inputs_need_no_gradient(trainee):
    assert not trainee.model.embedding.weight.requires_grad
    expected = trainee.step()
    assert "layers.0.qkv.a" in expected.gradients
    with FrozenLayerStreamer(trainee.model, prefetch=0):
        assert trainee.step() == expected


def test_layer_inputs_that_need_a_gradient(trainee):
    trainee.model.embedding.weight.requires_grad_()
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        assert trainee.step() == expected


def test_training_goes_the_same_way(trainee):
    def losses():
        torch.manual_seed(1)
        trained = [p for p in trainee.model.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in trained]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        seen = []
        for _ in range(5):
            seen.append(trainee.step().loss)
            optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(trained, start, strict=True):
                parameter.copy_(value)
        return torch.stack(seen)

    expected = losses()
    with FrozenLayerStreamer(trainee.model):
        assert torch.equal(losses(), expected)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("segment", [1, 3])
def test_gradient_checkpointing(trainee, use_reentrant, segment):
    model = trainee.model

    def run(x, start):
        for layer in model.layers[start : start + segment]:
            x = layer(x)
        return x

    def loss():
        x = model.embedding(trainee.ids).requires_grad_()
        for start in range(0, 6, segment):
            x = checkpoint(run, x, start, use_reentrant=use_reentrant)
        return model.head(model.norm(x)).square().mean()

    expected = run_step(model, loss)
    for prefetch in (0, 1, 2):
        with FrozenLayerStreamer(model, prefetch=prefetch) as streamer:
            for _ in range(3):
                assert run_step(model, loss) == expected
            if segment == 1:
                late = streamer.report.late_loads
                assert run_step(model, loss) == expected
                assert streamer.report.late_loads == late or prefetch == 0


def test_layers_that_are_skipped_or_run_twice(trainee):
    model = trainee.model

    def loss(order):
        x = model.embedding(trainee.ids)
        for index in order:
            x = model.layers[index](x)
        return model.head(model.norm(x)).square().mean()

    orders = [[0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [1, 4], [0, 1, 0, 1, 2, 2], [5, 3, 1], [0, 1, 2, 3, 4, 5]]
    expected = [run_step(model, lambda order=order: loss(order)) for order in orders]
    with FrozenLayerStreamer(model, prefetch=1):
        for order, result in zip(orders * 2, expected * 2, strict=True):
            assert run_step(model, lambda order=order: loss(order)) == result


def test_two_graphs_in_either_order(trainee):
    other = trainee.ids.flip(1)

    def both(order):
        trainee.model.zero_grad()
        losses = [trainee.model(ids).square().mean() for ids in (trainee.ids, other)]
        for index in order:
            losses[index].backward()
        return {n: p.grad.clone() for n, p in trainee.model.named_parameters() if p.grad is not None}

    for order in ([0, 1], [1, 0]):
        expected = both(order)
        with FrozenLayerStreamer(trainee.model, prefetch=1):
            for _ in range(2):
                assert all(torch.equal(grad, expected[name]) for name, grad in both(order).items())


def test_a_second_backward_through_the_same_graph(trainee):
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        trainee.model.zero_grad()
        loss = trainee.loss()
        loss.backward(retain_graph=True)
        trainee.model.zero_grad()
        loss.backward()
        gradients = {n: p.grad for n, p in trainee.model.named_parameters() if p.grad is not None}
        assert all(torch.equal(grad, expected.gradients[name]) for name, grad in gradients.items())


def test_evaluation_between_steps(trainee):
    expected = trainee.step()
    with torch.no_grad():
        logits = trainee.model(trainee.ids)
    with FrozenLayerStreamer(trainee.model, prefetch=1) as streamer:
        for _ in range(2):
            assert trainee.step() == expected
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    for _ in range(3):
                        assert torch.equal(trainee.model(trainee.ids), logits)
        late = streamer.report.late_loads
        with torch.no_grad():
            trainee.model(trainee.ids)
            trainee.model(trainee.ids)
        assert streamer.report.late_loads <= late + 1


def test_a_block_that_returns_several_tensors(trainee, device):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, pair):
            return {"pair": (self.left(pair["pair"][0]), self.right(pair["pair"][1]))}

    model = nn.Sequential(*(Two() for _ in range(4))).to(device.torch_device).requires_grad_(False)
    x = torch.randn(8, 64, device=device.torch_device, requires_grad=True)

    def gradient():
        pair = model({"pair": (x, x)})["pair"]
        (result,) = torch.autograd.grad((pair[0] * pair[1]).sum(), x)
        return result

    expected = gradient()
    with FrozenLayerStreamer(model, prefetch=0):
        for _ in range(2):
            assert torch.equal(gradient(), expected)


def test_encoder_and_decoder_lists_both_stream(device):
    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.decoder = nn.ModuleList(nn.Bilinear(64, 64, 64) for _ in range(3))

        def forward(self, x):
            memory = x
            for layer in self.encoder:
                memory = layer(memory).relu()
            for layer in self.decoder:
                x = layer(x, memory)
            return x

    model = Seq2Seq().to(device.torch_device).requires_grad_(False)
    x = torch.randn(2, 64, device=device.torch_device, requires_grad=True)

    def gradient():
        return torch.autograd.grad(model(x).sum(), x)[0]

    expected = gradient()
    with FrozenLayerStreamer(model, prefetch=1) as streamer:
        for _ in range(2):
            assert torch.equal(gradient(), expected)
        assert streamer.report.streamed_bytes >= sum(p.nbytes for p in model.parameters() if p.nbytes > 2**14)


def test_an_exception_inside_a_layer_does_no_harm(trainee):
    expected = trainee.step()

    def fail(*_):
        raise KeyError("planted")

    with FrozenLayerStreamer(trainee.model, prefetch=1):
        for layer in (0, 3, 5):
            handle = trainee.layers[layer].down.register_forward_hook(fail)
            with pytest.raises(KeyError, match="planted"):
                trainee.step()
            handle.remove()
            assert trainee.step() == expected


def test_an_exception_in_backward_does_no_harm(trainee):
    expected = trainee.step()

    def fail(_):
        raise KeyError("planted")

    with FrozenLayerStreamer(trainee.model, prefetch=1):
        loss = trainee.loss()
        handle = trainee.layers[2].down.a.register_hook(fail)
        with pytest.raises(KeyError, match="planted"):
            loss.backward()
        handle.remove()
        assert trainee.step() == expected


def test_autocast(trainee, device):
    def loss():
        with torch.autocast(device.torch_device.type, dtype=torch.bfloat16):
            return trainee.loss()

    expected = run_step(trainee.model, loss)
    with FrozenLayerStreamer(trainee.model, prefetch=1):
        for _ in range(2):
            assert run_step(trainee.model, loss) == expected


def test_a_loss_on_what_a_block_does_not_return(trainee):
    """A router's loss, or features for distillation: backward enters the block beside its output."""
    seen = []
    trainee.layers[2].gate.register_forward_hook(lambda _, __, output: seen.append(output))
    trainee.layers[4].up.base.register_forward_hook(lambda _, __, output: seen.append(output))

    def loss(with_output):
        seen.clear()
        main = trainee.loss()
        return sum(feature.square().mean() for feature in seen) + (main if with_output else 0)

    expected = {kind: run_step(trainee.model, lambda kind=kind: loss(kind)) for kind in (False, True)}
    assert "layers.5.up.a" not in expected[False].gradients
    for prefetch in (0, 1):
        with FrozenLayerStreamer(trainee.model, prefetch=prefetch):
            for kind in (False, True, False):
                assert run_step(trainee.model, lambda kind=kind: loss(kind)) == expected[kind]


def test_a_backward_to_be_differentiated_needs_the_weights_to_stay(device):
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device.torch_device).requires_grad_(False)
    x = torch.randn(2, 64, device=device.torch_device, requires_grad=True)

    def penalty():
        y = x
        for layer in model:
            y = layer(y).tanh()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    expected = penalty()
    with FrozenLayerStreamer(model, prefetch=0) as streamer:
        with pytest.raises(RuntimeError, match=r"create_graph=True .* try `with streamer\.gathered"):
            penalty()
        with streamer.gathered():
            assert torch.equal(penalty(), expected)
