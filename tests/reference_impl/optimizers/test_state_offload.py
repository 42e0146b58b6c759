# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import weakref

import pytest
import torch
from in_turns import in_turns
from optimizer_reference import MasterAdamW, batches
from optimizer_training import OPTIONS, assert_same_weights, train, twins

from reference_impl import OptimizerStateOffloader
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("offload_masters", [True, False])
def test_training_is_bitwise_that_of_the_wrapped_optimizer(device, offload, dtype, attached, offload_masters):
    model, plain = twins(device, dtype)
    optimizer = offload(model, offload_masters=offload_masters)
    if attached:
        optimizer.attach(model)
    data = batches(device.torch_device, 6)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=False, **OPTIONS), data)
    assert_same_weights(model, plain)


@in_turns(fraction=[0.0, 1e-3, 0.3, 1.0], slots=[3, 50], chunk_elements=[64, 500, 2**20])
def test_chunks_slots_and_fraction_change_no_bit(device, offload, chunk_elements, slots, fraction):
    model, plain = twins(device)
    budget = (slots * 10 + 10) * chunk_elements
    optimizer = offload(
        model, chunk_bytes=max(10 * chunk_elements, 768), device_budget_bytes=budget, fraction=fraction
    )
    optimizer.attach(model)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)
    ours, theirs = optimizer.state_dict()["state"], reference.inner.state_dict()["state"]
    listed = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert ours.keys() == {listed[i] for i in theirs}
    for index, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[listed[index]][name].cpu(), value.cpu()), name


@pytest.mark.parametrize("wraps", [torch.optim.Adam, torch.optim.SGD])
def test_other_formulas_are_bitwise_torch(device, offload, wraps):
    hyper = {"lr": 1e-2, "weight_decay": 0.1}
    if wraps is torch.optim.SGD:
        hyper |= {"momentum": 0.9, "nesterov": True}
    model, plain = twins(device)
    optimizer = offload(model, wraps=wraps, hyper=hyper)
    reference = MasterAdamW(plain, on_cpu=False)
    reference.inner = wraps(reference.masters, fused=True, **hyper)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.5, 1e6])
def test_clipping_is_exact(device, offload, max_grad_norm):
    model, plain = twins(device)
    optimizer = offload(model, max_grad_norm=max_grad_norm)
    optimizer.attach(model)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, MasterAdamW(plain, on_cpu=False, max_grad_norm=max_grad_norm, **OPTIONS), data)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("before", [0, 1])
def test_a_step_that_is_not_finite_changes_nothing(device, offload, fraction, bad, before):
    model, plain = twins(device)
    optimizer = offload(model, fraction=fraction)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    data = batches(device.torch_device, 3)
    train(model, optimizer, data[:before])
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    (model(data[1]) * bad).backward()
    optimizer.step()
    optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    torch.testing.assert_close(optimizer.state_dict(), states, rtol=0, atol=0)
    train(model, optimizer, data[2:])
    train(plain, reference, [*data[:before], *data[2:]])
    assert_same_weights(model, plain)


def test_grad_scaler_scales_and_skips(device, offload):
    model, plain = twins(device, torch.float32)
    optimizer = offload(model)
    optimizer.attach(model)
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], fused=True, **OPTIONS)
    scalers = [torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**10) for _ in range(2)]
    for index, batch in enumerate(batches(device.torch_device, 4)):
        for net, step, scaler in zip((model, plain), (optimizer, reference), scalers, strict=True):
            loss = net(batch)
            scaler.scale(loss * float("inf") if index == 1 else loss).backward()
            scaler.step(step)
            scaler.update()
            step.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    assert_same_weights(model, plain)


def test_schedulers_are_obeyed(device, offload):
    model, plain = twins(device)
    wrapped = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    optimizer = offload(model, wrapped=wrapped)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=8)
        for each in (optimizer, reference.inner)
    ]
    for batch in batches(device.torch_device, 6):
        train(model, optimizer, [batch])
        train(plain, reference, [batch])
        for scheduler in schedulers:
            scheduler.step()
    assert_same_weights(model, plain)
    optimizer.load_state_dict(optimizer.state_dict())
    assert wrapped.param_groups is optimizer.param_groups


def test_groups_keep_their_options_and_can_be_added(device):
    model, plain = twins(device)

    def groups(of):
        decay = [p for p in of.parameters() if p.requires_grad and p.ndim > 1]
        rest = [p for p in of.parameters() if p.requires_grad and p.ndim <= 1]
        return {"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}

    first, second = groups(model)
    wrapped = torch.optim.AdamW([first], fused=True, **OPTIONS)
    optimizer = OptimizerStateOffloader(wrapped, chunk_bytes=3072)
    optimizer.attach(model)
    optimizer.add_param_group(second)
    reference = MasterAdamW(plain, on_cpu=False)
    by_param = dict(zip(reference.params, reference.masters, strict=True))
    listed = [{**g, "params": [by_param[p] for p in g["params"]]} for g in groups(plain)]
    reference.inner = torch.optim.AdamW(listed, fused=True, **OPTIONS)
    data = batches(device.torch_device, 4)
    train(model, optimizer, data)
    train(plain, reference, data)
    assert_same_weights(model, plain)
    assert len(wrapped.param_groups) == 2
    # The forward waits for every weight of the second group too: none is used too early.
    model(data[0]).backward()
    assert not optimizer.streamed.holds_gradients
    optimizer.step()
    optimizer.close()


def test_parameters_may_come_and_go(device, offload):
    """A step with some parameters without a gradient, between steps with all gradients."""
    model, plain = twins(device)
    optimizer, reference = offload(model, chunk_bytes=3072), MasterAdamW(plain, on_cpu=False, **OPTIONS)
    optimizer.attach(model)
    for index, batch in enumerate(batches(device.torch_device, 5)):
        for net, step in ((model, optimizer), (plain, reference)):
            net(batch).backward()
            if index % 2:
                net.first.weight.grad = None
            step.step()
            step.zero_grad()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_parameter_that_is_unfrozen_later_trains_from_then_on(device, offload, attached, fraction):
    """As in torch with a new state, or with the one that the wrapped optimizer had for it."""
    model, plain = twins(device, torch.float32)
    data = batches(device.torch_device, 6)
    made = []
    for net in (model, plain):
        wrapped = torch.optim.AdamW(net.parameters(), fused=True, **OPTIONS)
        train(net, wrapped, data[:1])
        for frozen in (net.first, net.embed):
            frozen.requires_grad_(False)
        wrapped.state.pop(net.first.weight)
        made.append(wrapped)
    optimizer = offload(model, wrapped=made[0], fraction=fraction)
    if attached:
        optimizer.attach(model)
    for net, opt in ((model, optimizer), (plain, made[1])):
        train(net, opt, data[1:3])
        net.first.requires_grad_(True)
        train(net, opt, data[3:4])
        net.embed.requires_grad_(True)
        train(net, opt, data[4:])
    optimizer.synchronize()
    assert_same_weights(model, plain)
    theirs = made[1].state_dict()["state"]
    ours = optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert all(torch.equal(ours[index][name].cpu(), value.cpu()) for name, value in state.items())


def test_channels_last_parameters_keep_their_layout(device):
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 8, 3, device=device.torch_device).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    with OptimizerStateOffloader(inner, fraction=0.7, chunk_bytes=768) as optimizer:
        reference = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        for _ in range(3):
            image = torch.randn(2, 4, 6, 6, device=device.torch_device)
            for net, opt in ((model, optimizer), (plain, reference)):
                net(image).square().sum().backward()
                opt.step()
                opt.zero_grad()
        assert_same_weights(model, plain)
        torch.testing.assert_close(
            optimizer.state_dict()["state"],
            reference.state_dict()["state"],
            rtol=0,
            atol=0,
            check_device=False,
        )


def test_attached_steps_leave_the_gradients_and_let_them_go_in_forward(device, offload):
    model, _ = twins(device)
    optimizer = offload(model)
    optimizer.attach(model)
    first, second = batches(device.torch_device, 2)
    model(first).backward()
    gradients = [weakref.ref(param.grad) for param in model.parameters() if param.grad is not None]
    kept = model.first.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.first.weight.grad, kept)
    optimizer.zero_grad()
    assert all(gradient() is not None for gradient in gradients)
    model(second).backward()
    assert all(gradient() is None for gradient in gradients)
    # No weight was used before it was new.
    optimizer.step()


def test_detached_steps_leave_the_gradients(device, offload):
    model, _ = twins(device)
    model(batches(device.torch_device, 1)[0]).backward()
    kept = model.first.weight.grad.clone()
    offload(model, max_grad_norm=1e-3).step()
    assert torch.equal(model.first.weight.grad, kept)


def test_the_next_steps_first_states_come_in_at_once(device, offload):
    model, _ = twins(device)
    optimizer = offload(model, chunk_bytes=12 * 448)
    train(model, optimizer, batches(device.torch_device, 1))
    assert optimizer.streamed.loaded == optimizer.streamed.chunks[:3]
    deadlines = [chunk.deadline for chunk in optimizer.streamed.chunks]
    assert len(deadlines) > 3
    assert deadlines == sorted(deadlines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("fraction", "offload_masters"),
    [
        (0.4, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1.0, False), (0.4, False), (1.0, True)]),
    ],
)
def test_device_bytes_between_steps_are_the_ring(device, dtype, fraction, offload_masters):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=dtype) for _ in range(8)))
    model.to(device.torch_device)
    numel = sum(p.numel() for p in model.parameters())
    has_master = dtype == torch.bfloat16
    is_halved = has_master and offload_masters
    travelling = 8 + 2 * is_halved
    chunk_elements = 2**14
    # Gradients in fp32, and the masters and weights that halves are made of.
    budget = 3 * travelling * chunk_elements + (10 if is_halved else 4) * chunk_elements

    def steps(count):
        for _ in range(count):
            model(torch.randn(4, 256, device=device.torch_device, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        gc.collect()

    model(torch.randn(4, 256, device=device.torch_device, dtype=dtype)).sum().backward()
    model.zero_grad()
    gc.collect()
    with Ledger(device, track=model.parameters()) as ledger:
        base, host = ledger.device_bytes, host_book.live_bytes
        optimizer = OptimizerStateOffloader(
            torch.optim.AdamW(model.parameters(), fused=True),
            fraction=fraction,
            chunk_bytes=travelling * chunk_elements,
            offload_masters=offload_masters,
        )
        steps(2)
        extra = ledger.device_bytes - base
        resident = 12 if has_master else 8
        stays = resident * (1 - fraction) + 4 * fraction * (has_master and not offload_masters)
        assert extra == pytest.approx(stays * numel + budget, rel=0.01, abs=64 * 2**10)
        assert host_book.live_bytes - host == pytest.approx(travelling * fraction * numel, rel=0.02)
        optimizer.close()
        assert host_book.live_bytes == host


def test_a_step_raises_the_peak_by_no_states(device):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(8)))
    model.to(device.torch_device)
    with Ledger(device, track=model.parameters()) as ledger:
        inner = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = OptimizerStateOffloader(inner, chunk_bytes=10 * 2**14)
        # The twin halves masters in ordinary operators, whose results live at once for a chunk of them.
        temporary_bytes = 0 if device.is_accelerator else 28 * 2**14
        for _ in range(3):
            model(torch.randn(4, 512, device=device.torch_device, dtype=torch.bfloat16)).sum().backward()
            before = ledger.device_bytes
            ledger.reset_peak()
            optimizer.step()
            assert ledger.peak_device_bytes - before < 64 * 2**10 + temporary_bytes
            optimizer.zero_grad()
        optimizer.close()


@pytest.mark.slow
def test_many_steps_do_not_grow(device, offload):
    model = torch.nn.Linear(40, 30, dtype=torch.bfloat16, device=device.torch_device)
    plain = copy.deepcopy(model)
    with Ledger(device, track=model.parameters()) as ledger:
        optimizer = offload(model, chunk_bytes=12 * 448)
        optimizer.attach(model)
        reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
        seen = []
        for index in range(300):
            torch.manual_seed(index)
            batch = torch.randn(2, 40, dtype=torch.bfloat16).to(device.torch_device)
            for net, step in ((model, optimizer), (plain, reference)):
                net(batch).square().sum().backward()
                step.step()
                step.zero_grad()
            if index in (5, 299):
                optimizer.synchronize()
                gc.collect()
                seen.append((ledger.device_bytes, host_book.reserved_bytes, host_book.live_bytes))
    assert seen[0] == seen[1]
    assert_same_weights(model, plain)


def test_use_outside_the_owning_forward_waits(device, offload):
    model, plain = twins(device)
    optimizer = offload(model)
    optimizer.attach(model)
    data = batches(device.torch_device, 1)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    train(plain, reference, data)
    train(model, optimizer, data)
    ones = torch.ones(1, 48, dtype=torch.bfloat16, device=device.torch_device)
    for weight, stepping in ((plain.first.weight, reference), (model.first.weight, optimizer)):
        torch.nn.functional.linear(ones, weight).sum().backward()
        stepping.step()
        stepping.zero_grad()
    optimizer.synchronize()
    assert_same_weights(model, plain)


def test_close_is_final_and_repeatable(device, offload):
    model, _ = twins(device)
    optimizer = offload(model)
    with optimizer:
        pass
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def test_a_forgotten_offloader_is_collected(device):
    model, _ = twins(device)
    optimizer = OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), fused=True))
    optimizer.attach(model)
    train(model, optimizer, batches(device.torch_device, 1))
    watcher = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watcher() is None


def test_copies_are_refused_with_the_way_to_do_it(device, offload):
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(offload(twins(device)[0]))
