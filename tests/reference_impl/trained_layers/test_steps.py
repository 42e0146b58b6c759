# SPDX-License-Identifier: Apache-2.0
"""Training from the host changes no bit: losses, weights, masters and moments are those of the model on the device."""

import math

import pytest
import torch
from layers_trainee import CLIP, assert_same, batches, compare, decoder, resident, streamed, train
from torch import nn

from reference_impl import OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.options import Streaming
from reference_impl.trained_layers.segments import recompute_in_slices, sum_in_fp32
from reference_impl.verification.model import decoder_loss

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


@BOTH
@pytest.mark.parametrize("prefetch", [0, 2, 7])
def test_at_any_window(device, dtype, prefetch):
    report = compare(device, dtype=dtype, prefetch=prefetch)
    assert report.weights.late_loads == 0 or prefetch == 0


@BOTH
@pytest.mark.parametrize("chunk_elements", [pytest.param(64 * 5, marks=pytest.mark.slow), 64 * 50])
def test_in_chunks_of_any_size(device, dtype, chunk_elements):
    compare(device, dtype=dtype, streaming=Streaming(chunk_bytes=12 * chunk_elements))


@pytest.mark.parametrize("resident_layers", [1, 4])
def test_with_some_weights_on_the_device(device, resident_layers):
    report = compare(device, resident_layers=resident_layers)
    # Whole weights, spread over the layers.
    assert report.weights.resident_bytes <= resident_layers / 4 * (
        report.weights.resident_bytes + report.host.weights
    )
    assert report.weights.resident_bytes > 0


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=["bf16", "fp32"]
)
def test_with_inputs_on_the_host(device, dtype):
    compare(device, dtype=dtype, inputs="host")


@pytest.mark.parametrize(("kept", "slices"), [(True, 1), (True, 2), (1, 2)])
def test_with_attention_kept_on_the_host(device, kept, slices):
    compare(device, inputs="host", keep_attention=kept, slices=slices)


@pytest.mark.parametrize("inputs", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_in_slices_of_the_batch(device, inputs):
    compare(device, slices=2, inputs=inputs)


@BOTH
def test_with_tied_embeddings(device, dtype):
    compare(device, dtype=dtype, tied=True)


@BOTH
def test_with_a_weight_that_two_modules_of_a_block_hold(device, dtype):
    one, other = (decoder(device, dtype=dtype) for _ in range(2))
    for layer in (*one.layers, *other.layers):
        layer.up.weight = layer.gate.weight
    data, reference = batches(device, 3), resident(one)
    expected = train(one, reference, data)
    with streamed(other, prefetch=0) as streamer:
        assert train(other, streamer.optimizer, data) == expected
        assert_same(other, streamer.optimizer, one, reference)
    assert other.layers[0].up.weight is other.layers[0].gate.weight


@BOTH
@pytest.mark.parametrize("backwards", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_several_backwards_add_up(device, dtype, backwards):
    compare(device, dtype=dtype, backwards=backwards)


def test_gradients_of_slices_add_up_in_fp32(device):
    torch.manual_seed(0)
    block = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16, device=device.torch_device)
    x = torch.randn(16, 4, 32, dtype=torch.bfloat16, device=device.torch_device)
    parts = []
    for each in reversed(x.split(1)):
        block.weight.grad = None
        block(each).float().square().sum().backward()
        parts.append(block.weight.grad.float())
    block.weight.grad = None
    undo = [sum_in_fp32(block.parameters()), recompute_in_slices(block, 16)]
    block(x).float().square().sum().backward()
    assert torch.equal(block.weight.grad, sum(parts[1:], parts[0]))
    for each in undo:
        each()
    assert block.weight.grad_dtype == torch.bfloat16


class Repeated(nn.Module):
    """One block that runs several times, as ALBERT's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh())])
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(3):
            x = self.layers[0](x)
        return self.head(x).float().square().mean()


def rounded_once(param):
    """Round a sum in fp32, as where it leaves for the host."""
    param.grad.copy_(param.grad.to(param.dtype))


@BOTH
@pytest.mark.parametrize("slices", [1, 2])
def test_a_block_that_runs_several_times(device, dtype, slices):
    """Its gradient has a part of each run and slice; they add up as without offload, in fp32 where it is sliced."""
    other, model = (Repeated().to(device.torch_device, dtype) for _ in range(2))
    recompute_in_slices(other.layers[0], slices)
    if slices > 1:
        sum_in_fp32(other.layers.parameters())
    for param in other.parameters():
        param.register_post_accumulate_grad_hook(rounded_once)
    adamw, given = (torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (other, model))
    with (
        OptimizerStateOffloader(adamw) as reference,
        TrainableLayerStreamer(model, given, layers=model.layers, prefetch=0, slices=slices) as streamer,
    ):
        for x in torch.randn(3, 4, 8, 32, device=device.torch_device).to(dtype):
            for each, optimizer in ((other, reference), (model, streamer.optimizer)):
                each(x).backward()
                optimizer.step()
                optimizer.zero_grad()
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected)


def test_a_step_whose_gradients_are_not_finite_changes_nothing(device):
    compare(device, factors=[1.0, math.inf, 64.0, math.inf, 0.02], steps=5, tied=True)


def test_without_clipping(device):
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    with streamed(model, max_grad_norm=None) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)


def groups(model):
    """Two, whose parameters are in every layer."""
    named = list(model.named_parameters())
    norms = [param for name, param in named if "norm" in name]
    return [
        {"params": norms, "weight_decay": 0.0},
        {"params": [param for name, param in named if "norm" not in name], "weight_decay": 0.3},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"states": "bf16-moments"},
        {"states": "compact-8"},
        {"states": "compact-16"},
    ],
    ids=str,
)
def test_in_every_form_of_states_it_is_as_if_states_alone_streamed(device, form):
    ids = batches(device, 4)
    other, model = decoder(device), decoder(device)
    for layer in other.layers:
        recompute_in_slices(layer, 1)
    with OptimizerStateOffloader(
        torch.optim.AdamW(groups(other), fused=True), max_grad_norm=CLIP, chunk_bytes=2**14, **form
    ) as optimizer:
        expected = train(other, optimizer, ids)
        states = optimizer.state_dict()["state"]
    wrapped = torch.optim.AdamW(groups(model), fused=True)
    streaming = Streaming(chunk_bytes=2**15, **form)
    with TrainableLayerStreamer(model, wrapped, max_grad_norm=CLIP, streaming=streaming) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        for key, state in streamer.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(value, states[key][name]), (key, name)
    for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param)


class Skipping(nn.Module):
    """Blocks of which a batch skips one or takes one twice, one frozen, one with an unused parameter."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=dtype) for _ in range(5))
        self.layers[1].requires_grad_(False)
        self.layers[2].unused = nn.Parameter(torch.ones(40, dtype=dtype))
        self.head = nn.Linear(32, 8, dtype=dtype)

    def forward(self, x, visits):
        for index in visits:
            x = torch.tanh(self.layers[index](x)) + x
        return self.head(x).float().square().mean()


def test_with_layers_skipped_run_twice_and_out_of_order(device):
    orders = [(0, 1, 2, 3, 4), (0, 2, 4), (3, 1, 3), (4, 3, 2, 1, 0), (0, 1, 2, 3, 4), (2,)]
    inputs = [torch.randn(2, 4, 32, dtype=torch.bfloat16, device=device.torch_device) for _ in orders]

    def run(model, optimizer):
        losses = []
        for visits, x in zip(orders, inputs, strict=True):
            loss = model(x, visits)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    other, model = (Skipping().to(device.torch_device) for _ in range(2))
    reference = resident(other)
    expected = run(other, reference)
    with streamed(model) as streamer:
        assert run(model, streamer.optimizer) == expected
        for name, param in other.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), param.cpu()), name


def test_gradients_of_a_block_leave_together(device, monkeypatch):
    together = []
    offload = GradientMover.offload_together

    def counting(mover, members):
        together.append(len(members))
        return offload(mover, members)

    monkeypatch.setattr(GradientMover, "offload_together", counting)
    model = Skipping().to(device.torch_device)
    x = torch.randn(2, 4, 32, dtype=torch.bfloat16, device=device.torch_device)
    with streamed(model) as streamer:
        model(x, (0, 1, 2, 3, 4)).backward()
        # The third block has a parameter that is not used, so the next block's gradient says that it is over.
        assert together == [2, 2, 2, 2]
        streamer.optimizer.step()
        streamer.optimizer.zero_grad()
        # Here nothing does but the end of backward.
        model(x, (2,)).backward()
        assert together == [2, 2, 2, 2, 2]
        for param in model.parameters():
            assert param.grad is None or isinstance(param.grad, GradientStandIn)
        # Those that were dropped do not leave.
        model.zero_grad()
        model(x, (4, 2)).backward()
        assert together[5:] == [2, 2]


def test_evaluation_in_between_sees_the_new_weights(device):
    ids = batches(device, 4)
    other, model = decoder(device), decoder(device)
    reference = resident(other)
    with streamed(model) as streamer:
        for batch in ids:
            train(other, reference, [batch])
            train(model, streamer.optimizer, [batch])
            with torch.no_grad():
                assert torch.equal(model(batch), other(batch))
            with torch.inference_mode():
                assert torch.equal(model(batch), other(batch))


def test_clipping_by_the_users_own_hand(device):
    """`clip_grad_norm_` finds the norm, and the factor is applied to gradients that have left."""
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    reference = resident(other, max_grad_norm=None)
    with streamed(model, max_grad_norm=None) as streamer:
        for batch in ids:
            losses = []
            for each, optimizer in ((other, reference), (model, streamer.optimizer)):
                loss = decoder_loss(each(batch), batch)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(each.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
                losses.append((loss.item(), norm.item()))
            assert losses[0] == losses[1]
        assert_same(model, streamer.optimizer, other, reference)


def test_gradients_that_are_dropped_are_not_used(device):
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    reference = resident(other)
    expected = train(other, reference, ids[1:])
    with streamed(model) as streamer:
        decoder_loss(model(ids[0]), ids[0]).backward()
        model.zero_grad()
        assert train(model, streamer.optimizer, ids[1:]) == expected
        assert_same(model, streamer.optimizer, other, reference)
