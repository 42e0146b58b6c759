# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turns import in_turns
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, SMALL_CHUNKS, assert_same_weights, replace_job, train, twins
from optimizer_training import hybrid as build

from reference_impl import Budgets, CpuUpdate, Streaming
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.resident import ResidentUpdate
from reference_impl.optimizers.step import WorkLostError

SPLITS = [(0, 1, 0), (0, 0.6, 0.4), (0.3, 0.4, 0.3), (0.5, 0.5, 0), (0.2, 0, 0.8), (1, 0, 0)]


def assert_each_element_follows_its_tier(model, optimizer, on_device, on_cpu):
    """The device's elements equal those of `on_device`, the CPU's those of `on_cpu`."""
    for param, gpu, cpu in zip(model.parameters(), on_device.parameters(), on_cpu.parameters(), strict=True):
        if param in optimizer.members:
            cut = optimizer.members[param].on_device
            assert torch.equal(param.flatten()[:cut], gpu.flatten()[:cut])
            assert torch.equal(param.flatten()[cut:], cpu.flatten()[cut:])


def step_on_equal_gradients(models, optimizers, steps):
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for params in zip(*(model.parameters() for model in models), strict=True):
            if params[0].requires_grad:
                gradient = torch.randn(params[0].shape, generator=generator).to(params[0])
                for param in params:
                    param.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_share_is_bitwise_torch_on_its_device(device, split, dtype):
    model, on_cpu = twins(device, dtype)
    _, on_device = twins(device, dtype)
    with build(model, split=split) as optimizer:
        references = [
            MasterAdamW(on_cpu, on_cpu=True, **OPTIONS),
            MasterAdamW(on_device, on_cpu=False, **OPTIONS),
        ]
        step_on_equal_gradients([model, on_cpu, on_device], [optimizer, *references], 4)
        assert_each_element_follows_its_tier(model, optimizer, on_device, on_cpu)


shares = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


@settings(max_examples=15)
@given(shares, st.integers(768, 20000), st.integers(64, 4096), st.booleans())
def test_no_split_chunk_or_bucket_changes_a_bit(parts, chunk_bytes, bucket_elements, attached):
    device = Device.of("cpu")
    model, plain = twins(device)
    split = tuple(part / sum(parts) for part in parts)
    data = batches(device.torch_device, 3)
    sizes = {
        "streaming": Streaming(chunk_bytes=chunk_bytes),
        "cpu": CpuUpdate(bucket_elements=bucket_elements),
    }
    with build(model, split=split, max_grad_norm=0.5, **sizes) as optimizer:
        if attached:
            optimizer.attach(model)
        train(model, optimizer, data)
        optimizer.synchronize()
    train(plain, MasterAdamW(plain, on_cpu=True, max_grad_norm=0.5, **OPTIONS), data)
    assert_same_weights(model, plain)


@in_turns(split=SPLITS, dtype=[torch.bfloat16, torch.float32], attached=[False, True])
def test_a_checkpoint_that_is_loaded_over_later_training_is_as_it_was(device, split, dtype, attached):
    model, _ = twins(device, dtype)
    data = batches(device.torch_device, 6)
    with build(model, split=split) as optimizer:
        if attached:
            optimizer.attach(model)
        train(model, optimizer, data[:2])
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, data[2:4])
        expected = copy.deepcopy(model.state_dict())
        train(model, optimizer, data[4:])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, data[2:4])
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("split", [(0, 1, 0), (0.2, 0.5, 0.3)], ids=str)
def test_half_masters_change_no_bit(device, split, monkeypatch):
    model, plain = twins(device)
    data = batches(device.torch_device, 4)
    packed = build(model, split=split)
    # As on a GPU without triton.
    monkeypatch.setattr(Device, "has_kernels", False)
    with packed, build(plain, split=split) as whole:
        for each, its in ((model, packed), (plain, whole)):
            train(each, its, data)
            its.synchronize()
        ours, theirs = packed.state_dict()["state"], whole.state_dict()["state"]
    assert_same_weights(model, plain)
    for index, states in theirs.items():
        assert all(torch.equal(ours[index][name], value) for name, value in states.items())


def test_bf16_moments_train_nearly_as_well(device):
    model, plain = twins(device)
    data = batches(device.torch_device, 60)
    packed = Streaming(chunk_bytes=30000, states="bf16-moments")
    with build(model, split=(0, 0.8, 0.2), streaming=packed) as optimizer:
        ours = train(model, optimizer, data)
    theirs = train(plain, MasterAdamW(plain, on_cpu=False, **OPTIONS), data)
    assert abs(ours[-1].item() - theirs[-1].item()) < 0.05 * theirs[0].item()
    assert ours[-1] < 0.5 * ours[0]


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
@pytest.mark.parametrize("attached", [False, True])
def test_training_agrees_with_no_offload(device, backward_overlap, attached):
    model, plain = twins(device)
    data = batches(device.torch_device, 40)
    options = {
        "backward_overlap": backward_overlap,
        "lr": 1e-3,
        "streaming": Streaming(chunk_bytes=30000),
    }
    with build(model, split=(0.2, 0.5, 0.3), **options) as optimizer:
        if attached:
            optimizer.attach(model)
        ours = train(model, optimizer, data)
    theirs = train(plain, MasterAdamW(plain, on_cpu=False, **{**OPTIONS, "lr": 1e-3}), data)
    assert max(abs(a.item() - b.item()) for a, b in zip(ours, theirs, strict=True)) < 1e-3


@pytest.mark.parametrize("attached", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(device, attached):
    model, _ = twins(device)
    data = batches(device.torch_device, 3)
    with build(model, split=(0.2, 0.5, 0.3)) as optimizer:
        if attached:
            optimizer.attach(model)
        train(model, optimizer, data[:2])
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        (model(data[2]) * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict(), optimizer.state_dict()["state"]
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    for index, states in before[1].items():
        assert all(torch.equal(after[1][index][name], value) for name, value in states.items())


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_checkpoints_pass_between_splits_and_torch(device, split):
    model, other = twins(device)
    data = batches(device.torch_device, 5)
    with build(model, split=split) as optimizer:
        train(model, optimizer, data[:3])
        weights, states = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        other.load_state_dict(weights)
        with build(other, split=(0.1, 0.3, 0.6)) as loaded:
            loaded.load_state_dict(states)
            again = loaded.state_dict()["state"]
    assert again.keys() == states["state"].keys()
    for index, expected in states["state"].items():
        assert expected.keys() == again[index].keys()
        for name, value in expected.items():
            assert torch.equal(again[index][name].cpu(), value.cpu()), name


def test_a_loaded_checkpoint_trains_on_with_the_same_bits(device):
    model, other = twins(device)
    data = batches(device.torch_device, 6)
    with build(model, split=(0.2, 0.5, 0.3)) as optimizer, build(other, split=(0.2, 0.5, 0.3)) as loaded:
        train(model, optimizer, data[:3])
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        for each, its in ((model, optimizer), (other, loaded)):
            train(each, its, data[3:])
        assert_same_weights(model, other)


def test_gradients_of_streamed_parameters_are_freed_by_the_next_forward(device):
    model, _ = twins(device)
    data = batches(device.torch_device, 2)
    with build(model, split=(0, 0.7, 0.3)) as optimizer:
        optimizer.attach(model)
        model(data[0]).backward()
        kept = [
            weakref.ref(param.grad.kept if isinstance(param.grad, GradientStandIn) else param.grad)
            for param, member in optimizer.members.items()
            if member.streamed and param.grad is not None
        ]
        optimizer.step()
        stands = [param.grad for param, member in optimizer.members.items() if member.streamed]
        assert all(each is None or isinstance(each, GradientStandIn) for each in stands)
        model(data[1])
        assert len(kept) > 1
        assert not any(gradient() is not None for gradient in kept)


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_states_that_come_in_during_backward_change_no_bit(device, backward_overlap, monkeypatch):
    model, plain = twins(device)
    data = batches(device.torch_device, 5)
    options = {"split": (0.1, 0.6, 0.3), "backward_overlap": backward_overlap}
    streaming = SMALL_CHUNKS
    with (
        build(model, streaming=replace(streaming, prefetch_bytes=10**6), **options) as early,
        build(plain, streaming=streaming, **options) as late,
    ):
        early.attach(model)
        late.attach(plain)
        for each, its in ((model, early), (plain, late)):
            train(each, its, data)
        copies = Counter()
        copy_in = type(device).copy_in
        for each, its in ((model, early), (plain, late)):
            with monkeypatch.context() as patch:
                loss = each(data[0])
                patch.setattr(
                    type(device),
                    "copy_in",
                    lambda *args, its=its, **after: (copies.update([its]), copy_in(*args, **after))[1],
                )
                loss.backward()
        assert copies[early] > copies[late] == 0
        for its in (early, late):
            its.synchronize()
        assert_same_weights(model, plain)


def test_a_weight_used_before_it_is_new_is_waited_for(device):
    model, other = twins(device)
    ids = batches(device.torch_device, 1)[0]
    with build(model, split=(0, 1, 0)) as optimizer, build(other, split=(0, 1, 0)) as at_once:
        optimizer.attach(model)
        for each, stepping in ((other, at_once), (model, optimizer)):
            each(ids).backward()
            stepping.step()
            stepping.zero_grad()
            (next(each.parameters()).float() ** 2).sum().backward()
            stepping.step()
            stepping.zero_grad()
        optimizer.synchronize()
        assert_same_weights(model, other)


class OwnParameter(torch.nn.Parameter):
    """A parameter of a user's class, which keeps it."""


def test_a_parameter_of_another_class_that_is_used_before_it_is_new_is_refused(device):
    model, _ = twins(device)
    model.first.weight = OwnParameter(model.first.weight.detach().clone())
    with build(model, split=(0, 1, 0)) as optimizer:
        optimizer.attach(model)
        model(batches(device.torch_device, 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert type(model.first.weight) is OwnParameter
        (model.first.weight.float() ** 2).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"shape \(131, 48\) was used before its new weight had arrived"
        ):
            optimizer.step()
        optimizer.zero_grad()


def held_bytes(device):
    """Bytes on the device, reserved there, and live and reserved on the host."""
    device.synchronize()
    gc.collect()
    host = host_book.live_bytes, host_book.reserved_bytes
    if device.is_accelerator:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), *host
    plain = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [each for each in plain if each.layout == torch.strided]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values()), 0, *host


@pytest.mark.slow
def test_a_thousand_steps_hold_no_more_than_ten(device):
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16, device=device.torch_device)
    batch = torch.randn(4, 64, device=device.torch_device, dtype=torch.bfloat16)
    held = []
    streaming = Streaming(chunk_bytes=12 * 1024, prefetch_bytes=10**5)
    options = {"split": (0.2, 0.5, 0.3), "streaming": streaming}
    with build(model, **options) as optimizer:
        optimizer.attach(model)
        for step in range(1000):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (9, 999):
                optimizer.synchronize()
                held.append(held_bytes(device))
    # It may be less: memory of earlier tests went meanwhile.
    assert all(late <= early for early, late in zip(*held, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("split", [(0.35, 0, 0.65), (0, 0.35, 0.65)], ids=str)
def test_a_parameter_is_old_all_over_when_its_cpu_part_dies(device, dtype, split, monkeypatch):
    model, _ = twins(device, dtype)
    data = batches(device.torch_device, 3)
    optimizer = build(model, split=split)
    optimizer.attach(model)
    train(model, optimizer, data[:2])
    optimizer.synchronize()
    split_members = [each for each in optimizer.members.values() if each.on_device and each.on_cpu]
    before = [member.param.detach().clone() for member in split_members]

    def dies(workers, job, run):
        raise OSError("the disk is on fire")

    def finish_a_step():
        optimizer.step()
        optimizer.synchronize()

    replace_job(monkeypatch, dies)
    model(data[2]).backward()
    with pytest.raises(WorkLostError, match="the disk is on fire"):
        finish_a_step()
    device.synchronize()
    assert split_members
    for member, old in zip(split_members, before, strict=True):
        assert torch.equal(member.param, old)
    with torch.no_grad():
        # As a checkpoint is loaded for a new optimizer.
        for member, old in zip(split_members, before, strict=True):
            member.param.copy_(old + 1)
            assert torch.equal(member.param, old + 1)
    optimizer.close()


def test_everything_is_given_back(device):
    before = (host_book.live_bytes, host_book.reserved_bytes)
    model, _ = twins(device)
    optimizer = build(model, split=(0.2, 0.5, 0.3))
    train(model, optimizer, batches(device.torch_device, 1))
    optimizer.close()
    assert (host_book.live_bytes, host_book.reserved_bytes) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0.5, 0.6, 0.1)}, "sum to 1, not 1.2"),
        ({"split": (-0.1, 0.6, 0.5)}, "three shares in"),
        ({"split": (0.5, 0.5)}, "three shares"),
        ({"split": "all"}, "'auto' or three shares"),
        ({"split": (0, 1, 0), "offload_fraction": 0.5}, "beside offload_fraction"),
        ({"split": (0, 1, 0), "offload_filter": bool}, "offload_filter"),
        ({"budgets": Budgets(device_bytes=10**9)}, "expected split='auto'"),
        ({"split": (0, 1, 0), "budgets": Budgets(profile={})}, "expected split='auto'"),
        ({"split": "auto", "budgets": Budgets(profile={})}, "no hardware.gpu"),
        ({"split": "auto", "budgets": Budgets(device_bytes=100)}, r"device_bytes is 100; expected"),
        ({"split": (0, 1, 0), "streaming": Streaming(chunk_bytes=700)}, "chunk_bytes is 700"),
    ],
    ids=str,
)
def test_bad_options(device, options, message):
    model, _ = twins(device)
    before = host_book.live_bytes
    with pytest.raises(ValueError, match=message):
        build(model, **options)
    assert host_book.live_bytes == before


def test_what_comes_in_during_backward_streams_first_and_is_given_out_once(device):
    weights = [torch.zeros(640, dtype=torch.bfloat16, device=device.torch_device) for _ in range(8)]
    params = [torch.nn.Parameter(weight) for weight in weights]
    ahead = replace(SMALL_CHUNKS, prefetch_bytes=2 * 640 * 12)
    with build(params[:4], split=(0, 0.5, 0.5), streaming=ahead) as optimizer:
        optimizer.add_param_group({"params": params[4:]})
        streamed = [optimizer.members[param].streamed for param in params]
    assert streamed == [640, 640, 0, 0, 640, 0, 640, 0]


def test_the_link_is_busy_before_the_resident_update_runs(monkeypatch):
    """Prefetched chunks are updated first: their copies out and the next ones in run beside all else."""
    device, told = Device.of("cpu"), []
    model, _ = twins(device, torch.float32)
    update, copy_in, copy_out = ResidentUpdate.run, type(device).copy_in, type(device).copy_out

    def noted(name, run):
        return lambda *args, **kwargs: (told.append(name), run(*args, **kwargs))[1]

    with build(model, split=(0.5, 0.5, 0)) as optimizer:
        train(model, optimizer, batches("cpu", 2))
        monkeypatch.setattr(ResidentUpdate, "run", noted("resident", update))
        monkeypatch.setattr(type(device), "copy_in", noted("in", copy_in))
        monkeypatch.setattr(type(device), "copy_out", noted("out", copy_out))
        train(model, optimizer, batches("cpu", 1))
    before = told[: told.index("resident")]
    assert Counter(before) == {"out": 3, "in": 3}
    assert "out" in told[told.index("resident") :]
