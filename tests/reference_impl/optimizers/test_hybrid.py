# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import math

import pytest
import torch
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, assert_same_weights, fresh, train, twins

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers import SGD, Adam, resident
from reference_impl.optimizers.gradients.stand_in import GradientStandIn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
@pytest.mark.parametrize("attached", [False, True])
def test_everything_on_the_cpu_is_bitwise_torch(device, make, dtype, backward_overlap, attached):
    model, plain = twins(device, dtype)
    optimizer = make(model, offload_fraction=1.0, backward_overlap=backward_overlap)
    if attached:
        optimizer.attach(model)
    data = batches(device.torch_device, 5)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("bucket_elements", [64, 448, 2**20])
def test_bucket_size_changes_no_bit(device, make, bucket_elements):
    model, plain = twins(device)
    data = batches(device.torch_device, 4)
    train(model, make(model, offload_fraction=1.0, cpu=CpuUpdate(bucket_elements=bucket_elements)), data)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("fraction", [0.0, 1e-3, 0.25, 0.5, 0.75, 1.0])
def test_each_share_is_bitwise_torch_on_its_device(device, make, fraction):
    """Same gradients for all: every element follows the optimizer of the tier that holds its state."""
    model, on_cpu = twins(device)
    _, on_device = twins(device)
    optimizer = make(model, offload_fraction=fraction)
    references = [
        MasterAdamW(on_cpu, on_cpu=True, **OPTIONS),
        MasterAdamW(on_device, on_cpu=False, **OPTIONS),
    ]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for params in zip(model.parameters(), on_cpu.parameters(), on_device.parameters(), strict=True):
            if params[0].requires_grad:
                gradient = torch.randn(params[0].shape, generator=generator).to(params[0])
                for param in params:
                    param.grad = gradient.clone()
        for each in (optimizer, *references):
            each.step()
    for member in optimizer.members.values():
        index = [p is member.param for p in model.parameters()].index(True)
        cpu, gpu = list(on_cpu.parameters())[index], list(on_device.parameters())[index]
        mixed = torch.cat([gpu.flatten()[: member.resident], cpu.flatten()[member.resident :]])
        assert torch.equal(member.param.flatten(), mixed)


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.5, 1e6])
def test_clipping_is_exact(device, make, max_grad_norm):
    model, plain = twins(device)
    data = batches(device.torch_device, 4)
    optimizer = make(model, offload_fraction=1.0, max_grad_norm=max_grad_norm)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=True, max_grad_norm=max_grad_norm, **OPTIONS), data)
    assert_same_weights(model, plain)


def test_the_norm_can_be_reduced_over_ranks(device, make):
    """Twice the squared norm stands for a second, equal rank."""
    one, other = twins(device)
    data = batches(device.torch_device, 1)
    doubled = make(one, max_grad_norm=0.1, reduce_norm_squared=lambda squared: squared * 2)
    halved = make(other, max_grad_norm=0.1 / 2**0.5)
    train(one, doubled, data)
    train(other, halved, data)
    assert doubled.grad_norm.item() == pytest.approx(halved.grad_norm.item() * 2**0.5, rel=1e-6)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(device, make, fraction, bad):
    model, plain = twins(device)
    optimizer = make(model, offload_fraction=fraction)
    reference = MasterAdamW(plain, on_cpu=fraction > 0, **OPTIONS) if fraction != 0.5 else None
    data = batches(device.torch_device, 3)
    train(model, optimizer, data[:1])
    weights, before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    (model(data[1]) * bad).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    if reference is not None:
        train(plain, reference, data[:1])
        train(model, optimizer, data[2:])
        train(plain, reference, data[2:])
        assert_same_weights(model, plain)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_accumulation_copies_once_and_is_exact(device, make, micro_batches, backward_overlap):
    model, plain = twins(device)
    optimizer = make(model, backward_overlap=backward_overlap)
    reference = MasterAdamW(plain, on_cpu=True, **OPTIONS)
    data = batches(device.torch_device, 3 * micro_batches)
    for start in range(0, len(data), micro_batches):
        *first, last = data[start : start + micro_batches]
        with optimizer.accumulate():
            for batch in first:
                model(batch).backward()
        assert all(member.arrival is None for member in optimizer.members.values())
        model(last).backward()
        optimizer.step()
        optimizer.zero_grad()
        for batch in (*first, last):
            plain(batch).backward()
        reference.step()
        reference.zero_grad()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("options", [{}, {"offload_fraction": 0.5}, {"split": (0.3, 0.4, 0.3)}])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_a_second_backward_brings_gradients_back(device, make, options, factor):
    """Operations recorded in between are done, as scaling in place between two backwards would have been."""
    model, plain = twins(device)
    make(model, **options)
    first, second = batches(device.torch_device, 2)

    def accumulate(trained):
        trained(first).backward()
        if factor is not None:
            torch._foreach_mul_([p.grad for p in trained.parameters() if p.grad is not None], factor)
        trained(second).backward()
        trained(second).backward()

    accumulate(plain)
    with pytest.warns(UserWarning, match=r"optimizer\.accumulate\(\)") as caught:
        accumulate(model)
    assert len(caught) == 1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert not isinstance(one.grad, GradientStandIn)
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_a_second_backward_after_the_update_has_begun_says_how_to_accumulate(device, make):
    model, _ = twins(device)
    optimizer = make(model, backward_overlap="update")
    batch = batches(device.torch_device, 1)[0]
    model(batch).backward()
    # torch says it where the update wrote a weight between this forward and its backward.
    with pytest.raises(RuntimeError, match=r"accumulate|modified by an inplace operation"):
        model(batch).backward()
    optimizer.step()


def test_gradients_leave_the_device_during_backward(device, make):
    model, _ = twins(device)
    make(model, offload_fraction=1.0)
    model(batches(device.torch_device, 1)[0]).backward()
    trained = [param for param in model.parameters() if param.grad is not None]
    assert len(trained) > 3
    for param in trained:
        assert isinstance(param.grad, GradientStandIn)
        assert param.grad.kept is None


def test_zero_grad_drops_gradients_that_have_left(device, make):
    model, plain = twins(device)
    optimizer = make(model)
    data = batches(device.torch_device, 2)
    model(data[0]).backward()
    optimizer.zero_grad()
    train(model, optimizer, data[1:])
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data[1:])
    assert_same_weights(model, plain)


def test_zero_grad_refuses_when_the_update_has_begun(device, make):
    model, _ = twins(device)
    optimizer = make(model, backward_overlap="update")
    model(batches(device.torch_device, 1)[0]).backward()
    with pytest.raises(RuntimeError, match="step"):
        optimizer.zero_grad()
    optimizer.step()


def test_a_changed_learning_rate_is_noticed_when_backward_has_used_it(device, make):
    model, _ = twins(device)
    optimizer = make(model, backward_overlap="update")
    model(batches(device.torch_device, 1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 5.0
    with pytest.raises(RuntimeError, match=r"lr changed from 0\.01 to 5\.0"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()


def test_groups_and_schedulers_are_obeyed(device, make):
    model, plain = twins(device)

    def groups(of):
        decay = [p for p in of.parameters() if p.requires_grad and p.ndim > 1]
        rest = [p for p in of.parameters() if p.requires_grad and p.ndim <= 1]
        return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]

    ours = HybridDeviceOptimizer(groups(model), cpu=CpuUpdate(bucket_elements=1024), **OPTIONS)
    ours.attach(model)
    reference = MasterAdamW(plain, on_cpu=True, **OPTIONS)
    by_param = dict(zip(reference.params, reference.masters, strict=True))
    listed = [{**g, "params": [by_param[p] for p in g["params"]]} for g in groups(plain)]
    reference.inner = torch.optim.AdamW(listed, fused=True, **OPTIONS)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8) for o in (ours, reference.inner)
    ]
    for batch in batches(device.torch_device, 6):
        train(model, ours, [batch])
        train(plain, reference, [batch])
        for scheduler in schedulers:
            scheduler.step()
    assert_same_weights(model, plain)
    ours.close()


def test_a_group_can_be_added_later(device, make):
    model, plain = twins(device)
    first, rest = (
        list(model.first.parameters()),
        [p for n, p in model.named_parameters() if not n.startswith("first")],
    )
    optimizer = HybridDeviceOptimizer(rest, cpu=CpuUpdate(bucket_elements=1024), **OPTIONS)
    optimizer.add_param_group({"params": first})
    data = batches(device.torch_device, 3)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=True, **OPTIONS), data)
    assert_same_weights(model, plain)
    optimizer.close()


def test_closures_run_once(device, make):
    model, plain = twins(device)
    optimizer = make(model)
    batch, calls = batches(device.torch_device, 1)[0], []

    def closure():
        calls.append(1)
        loss = model(batch)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert calls == [1]
    assert torch.equal(loss, plain(batch))


@pytest.mark.parametrize("algorithm", [Adam(decoupled=False), SGD()], ids=["adam", "sgd"])
def test_other_formulas_are_bitwise_torch(device, algorithm):
    options = {"lr": 1e-2, "weight_decay": 0.1}
    if isinstance(algorithm, SGD):
        options |= {"momentum": 0.9, "nesterov": True}
    model, plain = twins(device)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), algorithm=algorithm, cpu=CpuUpdate(bucket_elements=1024), **options
    )
    reference = MasterAdamW(plain, on_cpu=True)
    of = torch.optim.SGD if isinstance(algorithm, SGD) else torch.optim.Adam
    reference.inner = of(reference.masters, fused=True, **options)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)
    optimizer.close()


def test_grad_scaler_scales_and_skips(device, make):
    model, plain = twins(device, torch.float32)
    optimizer = make(model, backward_overlap="nothing")
    reference = MasterAdamW(plain, on_cpu=True, **OPTIONS)
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**10, growth_interval=2)
    data = batches(device.torch_device, 4)
    for index, batch in enumerate(data):
        loss = model(batch)
        scaler.scale(loss * float("inf") if index == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if index != 1:
            train(plain, reference, [batch])
    assert scaler.get_scale() == 2.0**10
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_grad_scaler_is_refused_where_the_update_has_begun(device, make):
    model, _ = twins(device, torch.float32)
    optimizer = make(model, offload_fraction=0.5, backward_overlap="update")
    scaler = torch.amp.GradScaler(device.torch_device.type)
    scaler.scale(model(batches(device.torch_device, 1)[0])).backward()
    with pytest.raises(RuntimeError, match="backward_overlap="):
        scaler.step(optimizer)
    optimizer.step()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_grad_scaler_sees_gradients_that_have_left(device, make, bad):
    model, _ = twins(device, torch.float32)
    optimizer = make(model, offload_fraction=0.5)
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=4.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (scaler.scale(model(batches(device.torch_device, 1)[0])) * bad).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_resident_bytes_follow_the_fraction(device, fraction):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(8)))
    model.to(device.torch_device)
    numel = sum(p.numel() for p in model.parameters())
    # The first product on CUDA brings a workspace that stays; earlier tests leave garbage.
    model(torch.randn(4, 256, device=device.torch_device, dtype=torch.bfloat16)).sum().backward()
    model.zero_grad()
    gc.collect()
    with Ledger(device, track=model.parameters()) as ledger:
        base = ledger.device_bytes
        optimizer = HybridDeviceOptimizer(
            model.parameters(), offload_fraction=fraction, cpu=CpuUpdate(bucket_elements=2**14)
        )
        for _ in range(2):
            model(torch.randn(4, 256, device=device.torch_device, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize()
        optimizer.synchronize()
        gc.collect()
        extra = ledger.device_bytes - base
    bucket_bytes = 2**14 * 2
    assert extra <= 12 * (1 - fraction) * numel + 2 * bucket_bytes
    assert extra >= 12 * (1 - fraction) * numel - 64 * 12
    optimizer.close()


def test_host_bytes_an_offloaded_element(device, make):
    model, _ = twins(device)
    gc.collect()
    before = host_book.live_bytes
    optimizer = make(model)
    numel = sum(member.on_cpu for member in optimizer.members.values())
    assert host_book.live_bytes - before <= 16 * numel


def test_channels_last_parameters_keep_their_layout(device):
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 8, 3, device=device.torch_device).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    images = [torch.randn(2, 4, 6, 6, device=device.torch_device) for _ in range(3)]
    with HybridDeviceOptimizer(model.parameters(), offload_fraction=0.7, **OPTIONS) as optimizer:
        reference = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        for image in images:
            for net, opt in ((model, optimizer), (plain, reference)):
                net(image).square().sum().backward()
                opt.step()
                opt.zero_grad()
        for left, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left, right)


def test_a_long_member_is_widened_in_parts(device, make, monkeypatch):
    """At most a chunk is on the device in fp32 for the update, however long a table is."""
    peaks, models = [], []
    for elements in (2**26, 96):
        monkeypatch.setattr(resident, "WIDENED_ELEMENTS", elements)
        model = fresh(device)
        optimizer = make(model, offload_fraction=0.0, max_grad_norm=0.05)
        data = batches(device.torch_device, 4)
        train(model, optimizer, data[:1])
        with Ledger(device, track=list(model.parameters())) as ledger:
            loss = model(data[1]).float().square().mean()
            loss.backward()
            ledger.reset_peak()
            optimizer.step()
            peaks.append(ledger.peak_device_bytes - ledger.device_bytes)
            optimizer.zero_grad()
        train(model, optimizer, data[2:])
        models.append(model)
    assert_same_weights(*models)
    largest = max(param.numel() for param in models[0].parameters())
    assert peaks[1] <= peaks[0] - 4 * (largest - 96)
