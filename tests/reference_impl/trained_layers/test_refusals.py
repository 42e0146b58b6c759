# SPDX-License-Identifier: Apache-2.0
"""Unsupported arguments are refused by name, with advice, before anything is moved."""

import io
from types import SimpleNamespace

import pytest
import torch
from late_device import LateTwin
from layers_trainee import assert_same, batches, decoder, resident, streamed, train, wrapped
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from reference_impl import TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.distributed import host_room
from reference_impl.memory.host import HostMemoryError
from reference_impl.optimizers.options import Streaming
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def untouched(model):
    return [(param.data_ptr(), type(param), param._version) for param in model.parameters()]


def refused(model, error, match, *, optimizer=None, **options):
    before = untouched(model)
    with pytest.raises(error, match=match):
        TrainableLayerStreamer(model, optimizer or wrapped(model), **options)
    assert untouched(model) == before
    assert not any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())


def test_a_host_without_the_room_is_told_item_by_item(device, monkeypatch):
    model = decoder(device)
    match = (
        r"GiB needed.*weights of blocks 0\.\d GB, gradients 0\.\d GB, masters and moments 0\.\d GB; "
        r"try Streaming\(states='bf16-moments'\).*freezing"
    )
    monkeypatch.setattr(host_room, "available_by_pool", lambda: {"host": 2**20})
    refused(model, HostMemoryError, match)


def test_the_room_that_compact_states_need_is_counted(device):
    with streamed(decoder(device), streaming=Streaming(states="compact-8")) as streamer:
        needed = streamer.report.host
    # But for norms, whose states are exact.
    assert needed.states == pytest.approx(needed.gradients // 2 * 3.0625, rel=1e-3)


def test_a_model_without_blocks(device):
    refused(nn.Linear(4, 4).to(device.torch_device), ValueError, "no repeated blocks")


def test_slices_of_one_buffer(device):
    model = decoder(device)
    params = list(model.parameters())
    vector_to_parameters(parameters_to_vector(params).detach().clone(), params)
    refused(
        model, ValueError, r"and embedding\.weight are slices of one buffer .*p\.data = p\.data\.clone\(\)"
    )
    for p in model.parameters():
        p.data = p.data.clone()
    with streamed(model):
        pass


def test_parameters_cannot_be_saved_by_themselves_before_a_step_nor_after(device):
    model = decoder(device)
    optimizer = wrapped(model)
    with TrainableLayerStreamer(model, optimizer) as streamer:
        for ids in batches(device, 2):
            with pytest.raises(
                RuntimeError, match=r"layers\.0.*is not on the device.*try `with streamer\.gathered"
            ):
                torch.save(dict(model.named_parameters()), io.BytesIO())
            with streamer.gathered():
                torch.save(dict(model.named_parameters()), io.BytesIO())
            decoder_loss(model(ids), ids).backward()
            streamer.optimizer.step()
            streamer.optimizer.zero_grad()


def test_a_block_that_is_not_self_contained(device):
    model = decoder(device)
    model.layers[2].up.weight = model.layers[1].up.weight
    refused(model, ValueError, r"layers\.\d\.up\.weight is used by another block")


def test_layers_that_are_computed_again_already(device):
    model = decoder(device)
    model.layers.gradient_checkpointing = True
    refused(model, ValueError, "layers has gradient_checkpointing switched on")


def test_blocks_that_train_nothing(device):
    model = decoder(device)
    model.layers.requires_grad_(False)
    refused(model, ValueError, "train nothing.*FrozenLayerStreamer")


def test_parameters_that_the_optimizer_does_not_know(device):
    model = decoder(device)
    some = torch.optim.AdamW(model.layers.parameters(), fused=True)
    refused(model, ValueError, "embedding.weight requires a gradient and is in no group", optimizer=some)
    foreign = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))], fused=True)
    refused(model, ValueError, "a parameter of shape .3,. that the model has not", optimizer=foreign)


class Whole(torch.optim.Optimizer):
    """An update that needs whole matrices."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})


def test_an_optimizer_of_another_formula(device):
    model = decoder(device)
    refused(model, TypeError, "formula of Whole is not among.*AdamW", optimizer=Whole(model.parameters()))
    refused(model, ValueError, "fused is None", optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": 1.5}, "prefetch=1.5; expected a whole number of at least 0"),
        ({"prefetch": True}, "prefetch=True; expected a whole number"),
        ({"slices": 0}, "slices=0"),
        ({"slices": "2"}, "slices='2'; expected a whole number of at least 1"),
        ({"resident_layers": -1}, "resident_layers=-1; expected a whole number of at least 0"),
        ({"streaming": "exact"}, r"streaming='exact'; expected how states stream; try Streaming\(\)"),
        ({"cpu": 4}, r"cpu=4; expected how the CPU updates; try CpuUpdate\(threads=4\)"),
        ({"layers": 5}, "layers is 5; expected modules"),
        ({"layers": []}, r"layers is \[\]; expected modules"),
        ({"layers": [nn.ModuleList()]}, r"layers has a ModuleList of 0 modules.*try layers=model.layers"),
        ({"device": "gpu"}, "device is 'gpu'; expected a torch device"),
        ({"resident_layers": 5}, "resident_layers=5; expected 0 to 4"),
        ({"inputs": "disk"}, "inputs='disk'"),
        ({"keep_attention": True}, "keep_attention=True with inputs='device'; expected inputs='host'"),
        (
            {"keep_attention": 9, "inputs": "host"},
            "keep_attention is 9; expected True, False, or how many of the",
        ),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"streaming": Streaming(prefetch_bytes=5)}, "prefetch_bytes is 5"),
        ({"streaming": Streaming(chunk_bytes=1)}, "chunk_bytes is 1"),
    ],
    ids=str,
)
def test_options_out_of_range(device, options, match):
    refused(decoder(device), ValueError, match, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    refused(decoder(Device.of("cpu")), ValueError, "torch .* sees no CUDA device", device="cuda")


def test_a_batch_that_cannot_be_cut(device):
    model = decoder(device)
    with streamed(model, slices=3) as streamer:
        with pytest.raises(ValueError, match="batch of 2 sequences with slices=3"):
            train(model, streamer.optimizer, batches(device, 1))
        # The next batch is as if nothing had happened.
        train(model, streamer.optimizer, batches(device, 1, sequences=3))


class Sliced(nn.Module):
    """Blocks that get `given` beside their hidden states, and make `made` of them."""

    def __init__(self, given, made):
        super().__init__()
        self.given, self.made = given, made
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for layer in self.layers:
            layer.forward = lambda x, given, layer=layer: made(nn.functional.linear(x, layer.weight), given)

    def forward(self, x):
        others = []
        for layer in self.layers:
            x, other = layer(x, self.given)
            others.append(other)
        return x.square().sum(), others


@pytest.mark.parametrize(
    ("given", "made", "match"),
    [
        # One value for each sequence, of which each slice would get all.
        (
            torch.ones(2),
            lambda x, given: (x * given[:, None, None], None),
            r"tensor of shape \(2,\) with a batch of 2",
        ),
        # The same inside of an object.
        (
            [torch.ones(2)],
            lambda x, given: (x * given[0][:, None, None], None),
            r"tensor of shape \(2,\) with",
        ),
        (
            SimpleNamespace(batch=2),
            lambda x, given: (x * x.new_ones(given.batch, 1, 1), None),
            r"shape \(2, 3, 4\)",
        ),
        (None, lambda x, _: (x, x.mean(0)[None].repeat(2, 1, 1)), r"shape \(2, 3, 4\) for 1 of 2 sequences"),
        (None, lambda x, _: (x, x.detach().sum().item()), "for the first of 2 slices and .* for the last"),
    ],
)
def test_slices_that_are_no_parts_of_a_batch(device, given, made, match):
    model = Sliced(given, made)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with (
        TrainableLayerStreamer(model, optimizer, slices=2, device=device.torch_device),
        pytest.raises(ValueError, match=match + ".* try .*slices=1"),
    ):
        model(torch.randn(2, 3, 4).to(device.torch_device))


def test_slices_hand_on_what_they_are_given(device):
    """A block may also return a router's logits of all tokens, and the same number for each slice."""
    given = torch.ones(1, 3, 4).to(device.torch_device)
    model = Sliced(given, lambda x, given: (x + given, (given, x.flatten(0, 1), 7)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(4, 3, 4).to(device.torch_device)
    with TrainableLayerStreamer(model, optimizer, slices=2, device=device.torch_device):
        _, others = model(x)
    for handed_on, logits, number in others:
        assert handed_on is given
        assert (logits.shape, number) == ((12, 4), 7)


class Cache:
    """The cache that transformers passes to every layer for keys and values."""

    def get_seq_length(self):
        return 0


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(2))

    def forward(self, x, cache=None):
        for layer in self.layers:
            x = layer(x, past_key_values=cache)
        return x.sum()


class Caching(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)

    def forward(self, x, past_key_values=None):
        return super().forward(x)


def test_a_cache_of_keys_while_training(device):
    model = Cached().to(device.torch_device)
    x = torch.ones(2, 64, device=device.torch_device)
    with TrainableLayerStreamer(model, wrapped(model)):
        with pytest.raises(ValueError, match="use_cache = False"):
            model(x, Cache())
        with torch.no_grad():
            model(x, Cache())


@pytest.mark.parametrize("overlap", ["gradients", "update"])
@pytest.mark.parametrize("name", ["embedding.weight", "head.weight", "layers.1.mlp_norm.weight"])
def test_a_parameter_that_is_unfrozen_too_late(device, overlap, name):
    """Its batch changes nothing, whatever else has a gradient; without it training goes on."""
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    for each in (other, model):
        each.get_parameter(name).requires_grad_(False)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, [ids[0], ids[2]])
    with streamed(model, max_grad_norm=None, backward_overlap=overlap) as streamer:
        losses = train(model, streamer.optimizer, ids[:1])
        late = model.get_parameter(name).requires_grad_()
        with pytest.raises(
            RuntimeError, match=rf"^{name} was frozen .* try requires_grad_\(\) before the plan"
        ):
            train(model, streamer.optimizer, ids[1:2])
        assert streamer.optimizer.status == "untouched"
        streamer.optimizer.zero_grad()
        late.requires_grad_(False)
        assert losses + train(model, streamer.optimizer, ids[2:]) == expected
    for (each, param), same in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param, same), each


def test_a_parameter_that_is_unfrozen_too_late_while_it_is_lent(device):
    model = decoder(device)
    model.layers[1].requires_grad_(False)
    with streamed(model) as streamer:
        with streamer.gathered():
            model.layers[1].up.weight.requires_grad_()
        with pytest.raises(RuntimeError, match=r"^layers\.1\.up\.weight was frozen"):
            train(model, streamer.optimizer, batches(device, 1))
        model.layers[1].up.weight.grad = None
        assert streamer.optimizer.status == "untouched"


def test_an_update_while_weights_are_lent(device):
    """The step is taken, and carried out once they are back."""
    lend_around_a_step(device)


@pytest.mark.parametrize("seed", range(3))
def test_an_update_while_weights_are_lent_and_copies_are_late(monkeypatch, seed):
    """No weight goes home from memory that goes as the block is taken over again."""
    monkeypatch.setitem(Device.classes, "cpu", type("SeededTwin", (LateTwin,), {"seed": seed}))
    lend_around_a_step(Device.of("cpu"))


def lend_around_a_step(device):
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    reference = resident(other)
    expected = train(other, reference, ids)
    with streamed(model) as streamer:
        losses = train(model, streamer.optimizer, ids[:1])
        with streamer.gathered():
            losses += train(model, streamer.optimizer, ids[1:2])
            with pytest.raises(RuntimeError, match="while its weights are lent"):
                streamer.optimizer.synchronize()
        losses += train(model, streamer.optimizer, ids[2:])
        assert losses == expected
        assert_same(model, streamer.optimizer, other, reference)


def test_a_second_streamer_leaves_the_first_as_it_is(device):
    ids = batches(device, 3)
    other, model = decoder(device), decoder(device)
    expected = train(other, resident(other), ids)
    with streamed(model) as streamer:
        losses = train(model, streamer.optimizer, ids[:2])
        with pytest.raises(ValueError, match="another open optimizer trains a parameter"):
            streamed(model)
        assert losses + train(model, streamer.optimizer, ids[2:]) == expected
