# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for the rest, in one optimizer: bitwise torch's over fp32 masters."""

import copy
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from muon_reference import ADAMW, MUON, Experts, MasterMuon, groups_of, matrices_of, twins
from optimizer_reference import batches
from optimizer_training import assert_same_weights, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from reference_impl import (
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    Streaming,
    park,
)
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.optimizers import Budgets, Muon
from reference_impl.optimizers.streamed.matrices import MatrixUpdate


@pytest.fixture
def hybrid():
    built = []

    def build(model, *, muon=None, **options):
        built.append(HybridDeviceOptimizer(groups_of(model, **(muon or {})), **options))
        return built[-1]

    yield build
    for optimizer in built:
        optimizer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("attached", [False, True])
def test_training_is_bitwise_torch(device, hybrid, dtype, attached):
    model, plain = twins(device, dtype)
    optimizer = hybrid(model, split=(0, 1, 0))
    if attached:
        optimizer.attach(model)
    reference = MasterMuon(plain)
    data = batches(device.torch_device, 6)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)
    for ours, theirs in zip(matrices_of(model)[0], matrices_of(plain)[0], strict=True):
        if ours.grad is not None or ours in optimizer.state:
            assert torch.equal(
                optimizer.state[ours]["momentum_buffer"].cpu(), reference.momentum(theirs).cpu()
            )


@pytest.mark.parametrize(
    "muon",
    [
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"},
        {"ns_steps": 0},
        {"lr": torch.tensor(0.02)},
    ],
    ids=str,
)
def test_torchs_own_arguments(device, hybrid, muon):
    model, plain = twins(device)
    optimizer = hybrid(model, split=(0, 1, 0), muon=muon, max_grad_norm=0.5)
    reference = MasterMuon(plain, max_grad_norm=0.5, **muon)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)


# A matrix here has up to 6,288 elements of 8 or 10 bytes: the chunks hold one that is larger, one, some, or all.
@pytest.mark.parametrize("chunk_bytes", [768, 40_000, 2**24])
@pytest.mark.parametrize("split", [(1, 0, 0), (0.5, 0.5, 0), (0.3, 0.3, 0.4)])
def test_shares_and_chunks_change_no_bit(device, hybrid, chunk_bytes, split):
    model, plain = twins(device)
    optimizer = hybrid(model, split=split, streaming=Streaming(chunk_bytes=chunk_bytes), max_grad_norm=0.1)
    optimizer.attach(model)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    if device.torch_device.type == "cpu":
        train(plain, MasterMuon(plain, max_grad_norm=0.1), data)
        assert_same_weights(model, plain)
    for member in optimizer.members.values():
        if member.matrices is not None:
            assert member.on_cpu == 0
            assert member.resident % member.unit == 0


def test_the_cpu_share_is_for_the_rest(device, hybrid):
    model, _ = twins(device)
    optimizer = hybrid(model)
    for member in optimizer.members.values():
        assert (member.on_cpu == 0) == (member.matrices is not None)
    with pytest.raises(
        ValueError, match=r"split is \(0, 0, 1\).*matrices, which the CPU share does not hold"
    ):
        hybrid(Experts().to(device.torch_device), split=(0, 0, 1))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 2.0])
def test_the_fastest_split_leaves_matrices_a_part_of_the_budget(device, hybrid, share):
    """Of a budget for a share of all states; the ring comes on top."""
    elements, streaming = 48 * 1024, Streaming(chunk_bytes=2048)
    model = torch.nn.Module()
    model.matrices = torch.nn.ParameterList([torch.randn(48, 64).bfloat16() for _ in range(16)])
    model.table = torch.nn.Parameter(torch.randn(elements // 64, 64).bfloat16())
    model.to(device.torch_device)

    def made(budget_bytes):
        groups = [{"params": [*model.matrices], "use_muon": True}, {"params": [model.table]}]
        return HybridDeviceOptimizer(
            groups, split="auto", streaming=streaming, budgets=Budgets(device_bytes=budget_bytes)
        )

    with pytest.raises(ValueError, match=r"device_bytes is 1; expected (\d+)") as refused:
        made(1)
    ring_bytes = int(re.search(r"expected (\d+)", str(refused.value))[1])
    with made(ring_bytes + round(share * (12 + 8) * elements)) as optimizer:
        assert optimizer.split.resident == pytest.approx(min(share, 1.0), abs=0.01)
        for member in optimizer.members.values():
            assert member.matrices is None or member.on_cpu == 0


def test_accumulation_schedules_and_frozen_parameters(device, hybrid):
    model, plain = twins(device)
    optimizer, reference = (
        hybrid(model, split=(0.2, 0.4, 0.4), max_grad_norm=1.0),
        MasterMuon(plain, max_grad_norm=1.0),
    )
    optimizer.attach(model)
    data = batches(device.torch_device, 12)
    for index in range(4):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        for group in (*reference.muon.param_groups, *reference.adamw.param_groups):
            group["lr"] *= 0.7
        micro = data[3 * index : 3 * index + 3]
        with optimizer.accumulate():
            for batch in micro[:-1]:
                model(batch).backward()
        model(micro[-1]).backward()
        for batch in micro:
            plain(batch).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    if device.torch_device.type == "cpu":
        assert_same_weights(model, plain)
    assert model.unused.weight not in optimizer.state
    assert not bool(model.frozen.sub(torch.eye(48, device=device.torch_device)).count_nonzero())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("split", [(1, 0, 0), (0, 1, 0), (0.3, 0.3, 0.4)])
def test_a_step_that_is_not_finite_changes_nothing_of_either(device, hybrid, bad, split):
    model, plain = twins(device)
    optimizer, reference = hybrid(model, split=split), MasterMuon(plain)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data[:2])
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    (model(data[2]) * bad).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    torch.testing.assert_close(optimizer.state_dict(), states, rtol=0, atol=0)
    train(model, optimizer, data[3:])
    if device.torch_device.type == "cpu":
        train(plain, reference, [*data[:2], *data[3:]])
        assert_same_weights(model, plain)


@pytest.mark.parametrize("after", [(1, 0, 0), (0, 1, 0), (0.4, 0.3, 0.3)])
def test_resuming_at_another_split_is_bitwise(device, hybrid, after):
    model, plain = twins(device)
    first = hybrid(model, split=(0.2, 0.5, 0.3))
    data = batches(device.torch_device, 6)
    train(model, first, data[:3])
    saved, weights = first.state_dict(), copy.deepcopy(model.state_dict())
    resumed = Experts().to(device.torch_device)
    resumed.turned = torch.nn.Parameter(resumed.turned.detach())
    second = hybrid(resumed, split=after)
    resumed.load_state_dict(weights)
    second.load_state_dict(saved)
    train(resumed, second, data[3:])
    if device.torch_device.type == "cpu":
        train(plain, MasterMuon(plain), data)
        assert_same_weights(resumed, plain)


@pytest.mark.parametrize("split", [(1, 0, 0), (0, 1, 0), (0.3, 0.3, 0.4)])
def test_parking_in_between_changes_no_bit(device, hybrid, split):
    model, plain = twins(device)
    optimizer = hybrid(model, split=split)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data[:2])
    parked = park(model, optimizer)
    with parked:
        pass
    train(model, optimizer, data[2:])
    parked.close()
    if device.torch_device.type == "cpu":
        train(plain, MasterMuon(plain), data)
        assert_same_weights(model, plain)


def test_the_device_loads_its_libraries_before_the_first_step():
    MatrixUpdate(Device.of("cpu"))._build(Muon())


def in_bf16(model, **options):
    return HybridDeviceOptimizer(
        groups_of(model),
        split=(0, 1, 0),
        streaming=Streaming(states="bf16-moments", **options),
        max_grad_norm=1.0,
    )


def test_bf16_momentum_is_a_neighbour_of_the_exact_one_and_the_same_however_it_is_cut(device):
    model, plain = twins(device)
    other = copy.deepcopy(model)
    data = batches(device.torch_device, 4)
    reference = MasterMuon(plain, max_grad_norm=1.0)
    with in_bf16(model) as one, in_bf16(other, chunk_bytes=768) as cut:
        train(model, one, data[:1])
        train(plain, reference, data[:1])
        for param, exact in zip(matrices_of(model)[0], matrices_of(plain)[0], strict=True):
            if not param.requires_grad or model.unused.weight is param:
                continue
            # The first step's update reads the momentum before it is rounded.
            assert torch.equal(param, exact)
            ours, theirs = one.state[param]["momentum_buffer"].cpu(), reference.momentum(exact).cpu()
            assert not torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-40)
        train(model, one, data[1:])
        train(other, cut, data)
        assert_same_weights(model, other)
        saved, weights = one.state_dict(), copy.deepcopy(model.state_dict())
        (model(data[0]) * float("nan")).backward()
        one.step()
        one.zero_grad()
        torch.testing.assert_close(one.state_dict(), saved, rtol=0, atol=0)
        assert saved["state"][0]["step"] == 4
    # In another process the noise goes on with the step that was saved.
    resumed, again = copy.deepcopy(model), copy.deepcopy(model)
    with in_bf16(resumed) as first, in_bf16(again, chunk_bytes=768) as second:
        for net, optimizer in ((resumed, first), (again, second)):
            net.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        second.load_state_dict(second.state_dict())
        train(resumed, first, data)
        train(again, second, data)
        with in_bf16(model) as cut:
            model.load_state_dict(weights)
            cut.load_state_dict(saved)
            train(model, cut, data[:2])
            saved, weights = cut.state_dict(), copy.deepcopy(model.state_dict())
        with in_bf16(other) as cut:
            other.load_state_dict(weights)
            cut.load_state_dict(saved)
            train(other, cut, data[2:])
        assert_same_weights(resumed, again)
        assert_same_weights(resumed, other)


def test_a_table_behind_all_matrices_comes_in_among_them(device):
    """The link has time there; at the end the forward would wait for it."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(12))
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 64), *blocks, torch.nn.Linear(64, 100, bias=False)
    ).to(device.torch_device, torch.bfloat16)
    matrices, head = [block.weight for block in blocks], model[-1].weight
    two = [torch.optim.Muon(matrices), torch.optim.AdamW([model[0].weight, head], fused=True)]
    with OptimizerStateOffloader(two, chunk_bytes=16 * 1024) as optimizer:
        optimizer.attach(model)
        ids = torch.randint(0, 100, (3, 5), device=device.torch_device)
        for _ in range(2):
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        chunks = optimizer.streamed.chunks
        at_the_end = [index for index, chunk in enumerate(chunks) if chunk.pieces[0].member.param is head]
        others = [chunk for index, chunk in enumerate(chunks) if index not in at_the_end]
        assert len(at_the_end) > 2
        assert len(chunks) // 2 <= at_the_end[0] < at_the_end[-1] < len(chunks) - 1
        assert max(b - a for a, b in pairwise(at_the_end)) > 1
        assert [chunk.deadline for chunk in others] == sorted(chunk.deadline for chunk in others)


def test_half_masters_are_stored_with_bits_for_their_flags(device):
    weight = torch.nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16, device=device.torch_device))
    before = host_book.reserved_bytes
    with OptimizerStateOffloader(torch.optim.Muon([weight], **MUON)) as optimizer:
        (chunk,) = optimizer.streamed.chunks
        assert chunk.storage.nbytes == weight.numel() * (4 + 2) + weight.numel() // 8
        # Both of these masters round to the same weight.
        ties = torch.tensor([0x3F7F8000, 0x3F808000], dtype=torch.int32).view(torch.float32)
        masters = ties.repeat(weight.numel() // 2).view_as(weight)
        optimizer.state[weight]["master_param"] = masters
        assert torch.equal(optimizer.state[weight]["master_param"], masters)
        optimizer.state[weight]["momentum_buffer"] = -masters
        assert torch.equal(optimizer.state[weight]["master_param"], masters)
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], -masters)
        optimizer.refresh_masters()
        assert torch.equal(optimizer.state[weight]["master_param"], weight.float().cpu())
    assert host_book.reserved_bytes == before


def test_a_distributed_checkpoint_has_both(device, hybrid, tmp_path):
    (model, other), data = twins(device), batches(device.torch_device, 4)
    built = []
    for net in (model, other):
        # torch asks for a state of every parameter that is trained.
        net.unused.requires_grad_(requires_grad=False)
        built.append(hybrid(net, split=(0.2, 0.4, 0.4) if net is model else (0, 1, 0)))
    train(model, built[0], data[:2])
    weights, states = get_state_dict(model, built[0])
    dcp.save({"model": weights, "states": states}, checkpoint_id=tmp_path)
    expected = copy.deepcopy(model.state_dict())
    weights, states = get_state_dict(other, built[1])
    dcp.load({"model": weights, "states": states}, checkpoint_id=tmp_path)
    set_state_dict(other, built[1], model_state_dict=weights, optim_state_dict=states)
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name]), name
    train(model, built[0], data[2:])
    train(other, built[1], data[2:])
    if device.torch_device.type == "cpu":
        assert_same_weights(model, other)


def test_groups_are_added_with_their_formula(device, hybrid):
    model, plain = twins(device)
    whole, rest = matrices_of(model)
    optimizer = HybridDeviceOptimizer([{"params": rest, **ADAMW}], split=(0, 1, 0))
    optimizer.add_param_group({"params": whole, "algorithm": Muon(), **MUON})
    assert "algorithm" not in optimizer.param_groups[1]
    assert "betas" not in optimizer.param_groups[1]
    data = batches(device.torch_device, 3)
    train(model, optimizer, data)
    train(plain, MasterMuon(plain), data)
    assert_same_weights(model, plain)
    optimizer.close()
