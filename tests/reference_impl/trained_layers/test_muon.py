# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of layers that stream, AdamW for the rest: bitwise torch's over fp32 masters."""

import copy

import pytest
import torch
from muon_reference import ADAMW, MUON, ExpertLayers, MasterMuon, matrices_of, twins
from optimizer_reference import batches

from reference_impl import OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.options import CpuUpdate, Streaming
from reference_impl.trained_layers.segments import recompute_in_slices

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
CLIP = 0.5


def without_stacks(model):
    """Freeze parameters that torch's Muon does not take."""
    for layer in model.layers:
        for param in (layer.experts, layer.odd_experts):
            param.requires_grad_(False)
    return model


def pair(model, **muon):
    whole, rest = matrices_of(model)
    return [
        torch.optim.Muon([param for param in whole if param.dim() == 2], **{**MUON, **muon}),
        torch.optim.AdamW(rest, fused=True, **ADAMW),
    ]


def trained(model, optimizer, data, *, backwards=1, factors=None):
    losses = []
    for index, batch in enumerate(data):
        for _ in range(backwards):
            loss = model(batch) * (factors[index] if factors else 1.0)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(
    device, *, dtype=torch.bfloat16, max_grad_norm=CLIP, steps=4, backwards=1, factors=None, **options
):
    """Train both, with the same bits everywhere; return the streamer's report."""
    model, plain = (without_stacks(each) for each in twins(device, dtype, ExpertLayers))
    data = batches(device.torch_device, steps)
    for layer in plain.layers:
        recompute_in_slices(layer, 1)
    reference = MasterMuon(plain, max_grad_norm=max_grad_norm)
    expected = trained(plain, reference, data, backwards=backwards, factors=factors)
    with TrainableLayerStreamer(model, pair(model), max_grad_norm=max_grad_norm, **options) as streamer:
        assert trained(model, streamer.optimizer, data, backwards=backwards, factors=factors) == expected
        muon, _ = streamer.optimizer.state_dicts()
        moments = [muon["state"][index] for index in muon["param_groups"][0]["params"]]
        whole = [param for param in matrices_of(plain)[0] if param.requires_grad]
        for state, theirs in zip(moments, whole, strict=True):
            assert torch.equal(state["momentum_buffer"].cpu(), reference.momentum(theirs).cpu())
            if dtype != torch.float32:
                assert torch.equal(state["master_param"].cpu(), reference.masters[theirs].cpu())
        report = streamer.report
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    return report


@BOTH
@pytest.mark.parametrize("prefetch", [0, 2])
def test_at_any_window(device, dtype, prefetch):
    report = compare(device, dtype=dtype, prefetch=prefetch)
    assert report.weights.late_loads == 0 or prefetch == 0


# A matrix has up to 6,288 elements of 8 or 6.125 bytes: a chunk holds one that is larger, one, some, or a block's.
@pytest.mark.parametrize("chunk_bytes", [768, 50_000])
@pytest.mark.parametrize("split", [(0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.3, 0.3, 0.4)], ids=str)
def test_shares_and_chunks_change_no_bit(split, chunk_bytes):
    cpu = CpuUpdate(threads=2, bucket_elements=1000) if split[2] else None
    compare(Device.of("cpu"), split=split, cpu=cpu, streaming=Streaming(chunk_bytes=chunk_bytes))


@BOTH
@pytest.mark.parametrize("split", [(0.0, 1.0, 0.0), (0.4, 0.6, 0.0)], ids=str)
def test_an_update_in_backward(device, dtype, split):
    compare(device, dtype=dtype, max_grad_norm=None, backward_overlap="update", split=split)


@pytest.mark.parametrize(
    "options",
    [
        {"backwards": 3},
        {"factors": [1.0, float("inf"), 64.0, float("inf"), 0.02], "steps": 5},
        {"inputs": "host", "resident_layers": 1},
        {"max_grad_norm": None},
    ],
    ids=str,
)
def test_loops_and_options(device, options):
    compare(device, **options)


@pytest.mark.parametrize("split", [(0.4, 0.6, 0.0), (0.3, 0.3, 0.4)], ids=str)
def test_no_matrix_is_cut_and_the_host_has_what_was_said(device, split):
    """Momentum and half a master of each matrix that streams, with a flag a bit."""
    model = without_stacks(twins(device, make=ExpertLayers)[0])
    with TrainableLayerStreamer(model, pair(model), split=split) as streamer:
        optimizer, needed = streamer.optimizer, 0.0
        for member in optimizer.members.values():
            held = streamer.optimizer._placement._shares.staying.get(member.param, 0)
            if member.matrices is None:
                on_cpu = member.param in streamer.optimizer._placement._shares.on_cpu
                needed += 12 * member.param.numel() if on_cpu else 10 * (member.param.numel() - held)
            else:
                assert held in (0, member.param.numel())
                needed += 6.125 * (member.param.numel() - held)
        whole = [member for member in optimizer.members.values() if member.matrices is not None]
        staying = sum(optimizer._placement._shares.staying.get(m.param, 0) for m in whole)
        assert staying / sum(m.param.numel() for m in whole) == pytest.approx(split[0], abs=0.1)
        assert streamer.report.host.states == round(needed)


def test_rounded_momentum_is_the_same_however_it_is_cut(device):
    model, plain = (without_stacks(each) for each in twins(device, make=ExpertLayers))
    data = batches(device.torch_device, 4)
    rounded = Streaming(states="bf16-moments")
    with TrainableLayerStreamer(model, pair(model), streaming=rounded) as one:
        losses = trained(model, one.optimizer, data)
    cut = Streaming(states="bf16-moments", chunk_bytes=768)
    with TrainableLayerStreamer(plain, pair(plain), streaming=cut) as other:
        assert trained(plain, other.optimizer, data) == losses
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("split", [(0.0, 1.0, 0.0), (0.5, 0.5, 0.0)], ids=str)
def test_gradients_of_matrices_leave_in_backward(split):
    """The tensors on the device after backward were there before it."""
    device = Device.of("cpu")
    model = without_stacks(twins(device, make=ExpertLayers)[0])
    data = batches(device.torch_device, 3)
    with Ledger(device, track=data) as ledger, TrainableLayerStreamer(model, pair(model), split=split) as one:
        trained(model, one.optimizer, data[:2])
        one.optimizer.synchronize()
        before = ledger.device_bytes
        model(data[2]).backward()
        whole = sum(param.nbytes for param in matrices_of(model)[0] if param.requires_grad)
        assert ledger.device_bytes - before < whole / 10
        one.optimizer.step()
        one.optimizer.zero_grad()


def made(kind, model):
    if kind == "layers":
        streamer = TrainableLayerStreamer(model, pair(model), max_grad_norm=CLIP)
        return streamer.optimizer, streamer.close
    optimizer = OptimizerStateOffloader(pair(model), fraction=0.5, max_grad_norm=CLIP)
    optimizer.attach(model)
    for layer in model.layers:
        recompute_in_slices(layer, 1)
    return optimizer, optimizer.close


@pytest.mark.parametrize(
    ("first", "then"), [("layers", "states"), ("states", "layers"), ("layers", "layers")]
)
def test_a_run_goes_on_where_states_are_elsewhere(device, first, then):
    model, plain = (without_stacks(each) for each in twins(device, make=ExpertLayers))
    other = copy.deepcopy(model)
    data = batches(device.torch_device, 6)
    optimizer, close = made(first, model)
    trained(model, optimizer, data[:3])
    saved, weights = optimizer.state_dicts(), copy.deepcopy(model.state_dict())
    close()
    # Torch's own optimizers take the states that theirs would have saved.
    for each, state in zip(pair(copy.deepcopy(plain)), saved, strict=True):
        each.load_state_dict(state)
    other.load_state_dict(weights)
    optimizer, close = made(then, other)
    optimizer.load_state_dicts(saved)
    trained(other, optimizer, data[3:])
    close()
    if device.torch_device.type == "cpu":
        for layer in plain.layers:
            recompute_in_slices(layer, 1)
        trained(plain, MasterMuon(plain, max_grad_norm=CLIP), data)
        for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_schedulers_of_both_and_states_that_both_have_are_taken_over(device):
    model, plain = (without_stacks(each) for each in twins(device, torch.float32, ExpertLayers))
    data = batches(device.torch_device, 6)
    for layer in plain.layers:
        recompute_in_slices(layer, 1)

    def schedulers(optimizers):
        return [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step) for each in optimizers]

    def loop(net, optimizers, schedules, data):
        for batch in data:
            net(batch).backward()
            for each in (*optimizers, *schedules):
                each.step()
            for each in optimizers:
                each.zero_grad()

    theirs, ours = pair(plain), pair(model)
    loop(plain, theirs, schedulers(theirs), data)
    schedules = schedulers(ours)
    for layer in model.layers:
        layer.forward_of_class = layer.forward
        recompute_in_slices(layer, 1)
    loop(model, ours, schedules, data[:3])
    for layer in model.layers:
        layer.forward = layer.forward_of_class
    with TrainableLayerStreamer(model, ours) as streamer:
        loop(model, [streamer.optimizer], schedules, data[3:])
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_what_muon_does_not_take_is_refused_before_anything_moves(device):
    model = without_stacks(twins(device, make=ExpertLayers)[0])
    whole, rest = matrices_of(model)
    flat = [param for param in whole if param.dim() == 2]
    tables = [
        torch.optim.Muon([*flat, model.embed.weight], **MUON),
        torch.optim.AdamW([param for param in rest if param.dim() < 2], fused=True, **ADAMW),
    ]
    cases = [
        (tables, {}, ValueError, r"embed\.weight is the table of an embedding"),
        (pair(model), {"split": (0.0, 0.0, 1.0)}, ValueError, "which the CPU share does not hold"),
        (pair(model), {"streaming": Streaming(states="compact-8")}, ValueError, "moments of 16 or 32 bits"),
        (
            [*pair(model), torch.optim.SGD([flat[0]], lr=0.1, momentum=0.9, fused=True)],
            {},
            ValueError,
            "or both",
        ),
        (pair(model)[:1], {}, ValueError, "is in no group of the optimizer"),
    ]
    addresses = [param.data_ptr() for param in model.parameters()]
    for given, options, kind, says in cases:
        with pytest.raises(kind, match=says):
            TrainableLayerStreamer(model, given, **options)
        assert [param.data_ptr() for param in model.parameters()] == addresses
    with TrainableLayerStreamer(model, pair(model)):
        pass
