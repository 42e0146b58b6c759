# SPDX-License-Identifier: Apache-2.0
"""Every way to write a weight, beside every place of its master: the master follows, counted or not."""

import pytest
import torch
from in_turns import in_turns
from weight_writes import WAYS, batches_on, decoder, in_place, plain_losses, trained_by

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.optimizers.algorithms import SGD
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.parameter_state import OptimizerState
from reference_impl.verification.model import decoder_loss


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(device):
    return batches_on(device)


OPTIMIZERS = {
    "on the CPU": lambda params: HybridDeviceOptimizer(params, lr=1e-2),
    "on the CPU, in backward": lambda params: HybridDeviceOptimizer(
        params, lr=1e-2, backward_overlap="update"
    ),
    "three ways": lambda params: HybridDeviceOptimizer(
        params, lr=1e-2, split=(0.3, 0.3, 0.4), streaming=Streaming(chunk_bytes=2**16)
    ),
    "resident": lambda params: HybridDeviceOptimizer(params, lr=1e-2, offload_fraction=0.0),
    "streamed": lambda params: OptimizerStateOffloader(
        torch.optim.AdamW(params, lr=1e-2, fused=True), chunk_bytes=2**16
    ),
}


def written_beside(device, batches, make, way, *, attached, name="layers.1.gate.weight"):
    model = decoder(device)
    param = model.get_parameter(name)
    optimizer = make(list(model.parameters()))

    try:
        if attached:
            optimizer.attach(model)
        # Attached, its new value is still on its way: the write waits for it.
        return trained_by(optimizer, model, batches, lambda _: WAYS[way](param))
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()


@in_turns(way=WAYS, kind=OPTIMIZERS, attached=[True, False])
def test_masters_follow_what_was_written(device, batches, kind, way, attached):
    if device.is_accelerator and kind not in ("resident", "streamed"):
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    found = written_beside(device, batches, OPTIMIZERS[kind], way, attached=attached)
    assert found == plain_losses(device, way, "layers.1.gate.weight")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masters_of_what_was_not_changed_keep_what_the_weight_cannot_hold(device, batches, kind):
    model = decoder(device).to(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    param = model.layers[1].gate.weight
    decoder_loss(model(batches[0]), batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.state[param]["master_param"].clone().cpu()
    assert not torch.equal(before.to(torch.bfloat16).float(), before)
    with torch.no_grad():
        param.view(-1)[:100] = 1
    saved = optimizer.state_dict()["state"]
    index = [id(each) for each in model.parameters()].index(id(param))
    after = saved[index]["master_param"].view(-1).cpu()
    assert param.view(-1)[:100].eq(1).all()
    if kind == "streamed":
        # The low bits stay, less than half a unit of the weight, until somebody drops them.
        assert after[:100].to(torch.bfloat16).eq(1).all()
        optimizer.refresh_masters()
        assert optimizer.state[param]["master_param"].view(-1)[:100].eq(1).all()
    else:
        assert after[:100].eq(1).all()
    assert torch.equal(after[100:], before.view(-1)[100:])
    optimizer.close()


@pytest.mark.parametrize("kind", ["on the CPU", "three ways"])
def test_a_weight_that_is_written_past_its_parameter_while_its_new_value_is_on_the_way_is_refused(
    device, batches, kind
):
    """A tensor held before `step()` is waited for there; here it is taken without a wait."""
    model = decoder(device)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    optimizer.attach(model)
    decoder_loss(model(batches[0]), batches[0]).backward()
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():
        in_place(model.layers[1].gate.weight.detach())
    with pytest.raises(RuntimeError, match=r"was written after step\(\).*try optimizer\.synchronize\(\)"):
        model(batches[0])
    optimizer.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nobody_makes_masters_of_weights_that_nobody_writes(device, batches, kind, monkeypatch):
    """It would wait for a copy to the host."""
    monkeypatch.setattr(OptimizerState, "follow", lambda *_: pytest.fail("a master follows"))
    model = decoder(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    optimizer.attach(model)
    trained_by(optimizer, model, batches, lambda _: model.load_state_dict(start))
    optimizer.detach()
    trained_by(optimizer, model, batches, lambda _: optimizer.refresh_masters())
    trained_by(optimizer, model, batches, lambda _: optimizer.load_state_dict(optimizer.state_dict()))
    optimizer.close()


@pytest.mark.parametrize("kind", ["on the CPU", "three ways"])
def test_a_graph_from_before_a_step_is_no_use_after_it(device, batches, kind):
    model = decoder(device)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    old = decoder_loss(model(batches[0]), batches[0])
    decoder_loss(model(batches[0]), batches[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    optimizer.close()


@in_turns(
    states=["exact", "compact-8", "compact-16", "bf16-moments"],
    value=[0.0, -0.0, 1.0, -3.0],
    is_counted=[True, False],
)
def test_masters_whose_upper_half_is_the_weight_round_to_what_was_written(
    device, batches, states, value, is_counted
):
    """The lower half is of another weight; where it says that this was rounded up, a zero became no number."""
    model = decoder(device).to(torch.bfloat16)
    wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = OptimizerStateOffloader(wrapped, states=states)
    param = model.layers[1].gate.weight
    written = param if is_counted else param.data
    for ids in batches:
        decoder_loss(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            written.view(-1)[:1000] = value
    index = [id(each) for each in model.parameters()].index(id(param))
    master = optimizer.state_dict()["state"][index]["master_param"].view(-1)
    weight = param.detach().cpu().view(-1)
    if states.startswith("compact"):
        # Ties away from zero, whoever has written.
        upper = (master.view(torch.int32) + 0x8000) >> 16
        assert torch.equal(upper.to(torch.int16).view(torch.bfloat16), weight)
    else:
        # At a tie the low bits of before may round to the other neighbour.
        assert not is_counted or torch.equal(master.bfloat16(), weight)
    assert (master[:1000] - value).abs().max() <= abs(value) * 2**-8 + 1e-37
    optimizer.close()


@pytest.mark.parametrize("overlap", ["gradients", "update"])
def test_masters_of_what_never_leaves_follow_beside_streamed_layers(device, batches, overlap):
    model = decoder(device).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with TrainableLayerStreamer(model, optimizer, backward_overlap=overlap) as streamer:
        for ids in batches[:2]:
            decoder_loss(model(ids), ids).backward()
            streamer.optimizer.step()
            streamer.optimizer.zero_grad()
            streamer.optimizer.synchronize()
            with torch.no_grad():
                model.head.weight.fill_(0.5)
        decoder_loss(model(batches[2]), batches[2]).backward()
        streamer.optimizer.step()
        streamer.optimizer.synchronize()
        # One step of Adam moves an element by little more than the learning rate.
        assert (model.head.weight - 0.5).abs().max() < 0.05


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-2, fused=True, **options)


def momentum(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)


# Each place of a master: its construction, and the dtype of its weights.
MASTERS = {
    "on the CPU": (OPTIMIZERS["on the CPU"], torch.bfloat16),
    "on the CPU, in backward": (OPTIMIZERS["on the CPU, in backward"], torch.float16),
    "on the device": (OPTIMIZERS["resident"], torch.bfloat16),
    "on the device, of fp16": (OPTIMIZERS["resident"], torch.float16),
    "in three places": (OPTIMIZERS["three ways"], torch.bfloat16),
    "in three places, of fp16": (OPTIMIZERS["three ways"], torch.float16),
    "in three places, of momentum": (
        lambda params: HybridDeviceOptimizer(
            params, lr=1e-2, algorithm=SGD(), momentum=0.9, split=(0.3, 0.3, 0.4)
        ),
        torch.bfloat16,
    ),
    "streamed, of fp16": (lambda params: OptimizerStateOffloader(adamw(params)), torch.float16),
    "streamed, of momentum": (lambda params: OptimizerStateOffloader(momentum(params)), torch.bfloat16),
    "streamed, compact": (
        lambda params: OptimizerStateOffloader(adamw(params), states="compact-8"),
        torch.float16,
    ),
    "streamed, rounded": (
        lambda params: OptimizerStateOffloader(adamw(params), states="bf16-moments"),
        torch.float16,
    ),
    "half of them streamed": (
        lambda params: OptimizerStateOffloader(adamw(params), fraction=0.5, chunk_bytes=2**16),
        torch.bfloat16,
    ),
    "on the device, moments streamed": (
        lambda params: OptimizerStateOffloader(adamw(params), offload_masters=False),
        torch.bfloat16,
    ),
}

# Uncounted ways to write, each beside one with the same values that autograd counts.
_UNCOUNTED = {".data in place": "clamp_", "its storage": "in place"}
_WRITES = {
    f"{way}{', saved' if saves else ''}": (way, saves) for way in _UNCOUNTED for saves in (False, True)
}


@in_turns(every=len(_WRITES), place=MASTERS, writes=_WRITES)
def test_every_master_follows_what_nothing_counts(device, batches, place, writes):
    """A matrix is written after one step, and a vector after the next: neither write shows the other."""
    make, dtype = MASTERS[place]
    way, saves = _WRITES[writes]

    def states_after(way):
        model = decoder(device).to(dtype)
        optimizer = make(list(model.parameters()))
        saved, names = [], iter(["layers.1.gate.weight", "layers.1.attention_norm.weight"])

        def write(optimizer):
            WAYS[way](model.get_parameter(next(names)))
            if saves:
                saved.append(optimizer.state_dict()["state"])

        losses = trained_by(optimizer, model, batches, write)
        saved.append(optimizer.state_dict()["state"])
        weights = [param.detach().clone() for param in model.parameters()]
        optimizer.close()
        return losses, weights, saved

    losses, weights, saved = states_after(way)
    expected_losses, expected_weights, expected = states_after(_UNCOUNTED[way])
    assert losses == expected_losses
    assert all(map(torch.equal, weights, expected_weights))
    for found, wanted in zip(saved, expected, strict=True):
        for index, states in wanted.items():
            for key, value in states.items():
                assert torch.equal(found[index][key], value), (index, key)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_has_masters_of_what_was_written_just_before(device, batches, kind, way):
    model = decoder(device).to(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    names = ["layers.1.gate.weight", "layers.1.attention_norm.weight"]
    decoder_loss(model(batches[0]), batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    # `renorm_` works on rows.
    for name in names[:1] if way == "renorm_" else names:
        param = model.get_parameter(name)
        WAYS[way](param)
        master = optimizer.state_dict()["state"][index[name]]["master_param"].cpu()
        # Low bits that stay may round a tie to the other neighbour.
        apart = (master - param.detach().cpu().float()).abs()
        assert (apart <= param.detach().cpu().float().abs() * 2**-8 + 1e-37).all()
    optimizer.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_between_a_write_and_the_next_step_changes_no_bit_of_the_training(device, batches, kind):
    """The lower half of a hi/lo master stays behind a write, and a checkpoint had cleared it where weights are cut."""

    def trained(*, saves):
        model = decoder(device).to(torch.bfloat16)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        for batch in batches:
            for param in model.parameters():
                param.data.clamp_(-0.02, 0.02)
            if saves:
                optimizer.state_dict()
            decoder_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()["state"]
        optimizer.close()
        return [value.cpu() for each in saved.values() for value in each.values()]

    assert all(map(torch.equal, trained(saves=True), trained(saves=False)))


def test_a_write_that_undoes_a_load_is_followed(device, batches):
    """The weights are those with which the optimizer was made, so that a sum of then says nothing."""
    if device.is_accelerator:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")

    def trained(make):
        model = decoder(device)
        optimizer = make(list(model.parameters()))
        decoder_loss(model(batches[0]), batches[0]).backward()
        optimizer.step()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        states = optimizer.state_dict()
        if hasattr(optimizer, "close"):
            optimizer.close()
        for param in model.parameters():
            param.grad = None
            param.data.mul_(0.5)
        started = {name: value.clone() for name, value in model.state_dict().items()}
        again = make(list(model.parameters()))
        model.load_state_dict(saved)
        again.load_state_dict(states)
        for name, param in model.named_parameters():
            param.data.copy_(started[name])
        decoder_loss(model(batches[1]), batches[1]).backward()
        again.step()
        if hasattr(again, "close"):
            again.close()
        return [param.detach().clone() for param in model.parameters()]

    plain = trained(adamw)
    for kind, make in OPTIMIZERS.items():
        assert all(map(torch.equal, trained(make), plain)), kind


@pytest.mark.parametrize("way", _UNCOUNTED)
def test_all_buckets_of_a_written_weight_follow_where_backward_updates_some(device, batches, way):
    """A parameter in several buckets shares its last one with a parameter updated in part on the device."""
    if device.is_accelerator:
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")

    def trained(make):
        model = decoder(device)
        optimizer = make(list(model.parameters()))
        for ids in batches:
            for param in model.parameters():
                WAYS[way](param)
            decoder_loss(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "close"):
            optimizer.close()
        return [param.detach().clone() for param in model.parameters()]

    plain = trained(adamw)
    for elements in (1024, 3000, 10000):
        found = trained(
            lambda params, elements=elements: HybridDeviceOptimizer(
                params,
                lr=1e-2,
                offload_fraction=0.55,
                backward_overlap="update",
                cpu=CpuUpdate(bucket_elements=elements),
            )
        )
        assert all(map(torch.equal, found, plain)), elements
