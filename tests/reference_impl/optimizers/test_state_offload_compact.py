# SPDX-License-Identifier: Apache-2.0
"""Compact states in the optimizers: the bytes of the simple way, however they are cut, moved, saved and split."""

import copy
import gc

import pytest
import torch
from compact_reference import CompactAdamW
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, fresh, hybrid, train, twins
from optimizer_training import streaming as build
from torch.utils._pytree import tree_leaves

from reference_impl import CpuUpdate, OptimizerStateOffloader, Streaming
from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger

COMPACT = Streaming(chunk_bytes=6000, states="compact-8")


def accumulated(model, optimizer, data):
    """Train with two backwards a step."""
    for one, other in zip(data[::2], data[1::2], strict=True):
        model(one).backward()
        model(other).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("low_bits", "dtype"), [(8, torch.bfloat16), (16, torch.bfloat16), (8, torch.float16), (8, torch.float32)]
)
@pytest.mark.parametrize(
    ("fraction", "attached"),
    [
        (0.3, False),
        (1.0, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(0.0, False), (0.0, True), (0.3, True), (1.0, False)]
        ),
    ],
)
def test_training_is_that_of_the_simple_way(low_bits, dtype, fraction, attached):
    """At any cut: resident states are compact too, with the same noise."""
    device = Device.of("cpu")
    model, plain = twins(device, dtype)
    simple = CompactAdamW(plain, low_bits=low_bits, max_grad_norm=0.5, **OPTIONS)
    data = batches(device.torch_device, 6)
    options = {"chunk_bytes": 6000, "device_budget_bytes": 60_000 if attached else None}
    with build(
        model, states=f"compact-{low_bits}", fraction=fraction, max_grad_norm=0.5, **options
    ) as optimizer:
        if attached:
            optimizer.attach(model)
        accumulated(model, optimizer, data)
        accumulated(plain, simple, data)
        assert_same_weights(model, plain)
        states = optimizer.state_dict()["state"]
        for index, (param, twin) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            if twin not in simple.compact or index not in states:
                continue
            wanted = [*simple.compact[twin].moments(), simple.compact[twin].master]
            for name, value in zip(("exp_avg", "exp_avg_sq", "master_param"), wanted, strict=True):
                if name in states[index]:
                    ours = states[index][name].flatten()
                    assert torch.equal(ours, torch.from_numpy(value).flatten()[: param.numel()]), name


@pytest.mark.parametrize("low_bits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoint_continues_to_the_bit_at_any_cut(device, low_bits, dtype, tmp_path):
    data = batches(device.torch_device, 5)
    whole, resumed = fresh(device, dtype), fresh(device, dtype)
    other_cut = {"fraction": 0.4, "chunk_bytes": 4000}
    with (
        build(whole, states=f"compact-{low_bits}") as one,
        build(resumed, states=f"compact-{low_bits}", **other_cut) as other,
    ):
        one.attach(whole)
        train(whole, one, data[:3])
        torch.save({"optimizer": one.state_dict(), "model": whole.state_dict()}, tmp_path / "saved.pt")
        train(whole, one, data[3:])
        train(resumed, other, data[:1])
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        torch.testing.assert_close(other.state_dict(), saved["optimizer"], rtol=0, atol=0)
        train(resumed, other, data[3:])
        assert_same_weights(whole, resumed)
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_an_exact_checkpoint_is_packed_and_a_compact_one_loads_anywhere(device):
    data = batches(device.torch_device, 6)
    exact, compact = fresh(device), fresh(device)
    with build(exact) as plain, build(compact, states="compact-8") as optimizer:
        train(exact, plain, data[:3])
        saved = plain.state_dict()
        compact.load_state_dict(exact.state_dict())
        optimizer.load_state_dict(saved)
        packed = optimizer.state_dict()
        for index, states in saved["state"].items():
            for name, value in states.items():
                ours = packed["state"][index][name]
                if name == "step" or value.dim() < 2:
                    assert torch.equal(ours, value), name
                elif name == "master_param":
                    torch.testing.assert_close(ours, value, rtol=2**-16, atol=0)
                else:
                    # Half a step of the top code, of the largest of all blocks at most.
                    assert (ours - value).abs().max() <= value.abs().max() / 100
                    assert not ((ours == 0) & (value > 0)).any() or name == "exp_avg"
        # And back: nothing is lost where there is room for everything.
        plain.load_state_dict(packed)
        torch.testing.assert_close(plain.state_dict(), packed, rtol=0, atol=0)


@pytest.mark.parametrize("low_bits", [8, 16])
def test_a_step_that_is_not_finite_changes_nothing(device, low_bits):
    model = fresh(device)
    data = batches(device.torch_device, 3)
    with build(model, states=f"compact-{low_bits}") as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:2])
        weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        (model(data[2]) * float("nan")).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), name
        torch.testing.assert_close(optimizer.state_dict(), states, rtol=0, atol=0)


def test_weights_that_somebody_else_wrote_are_the_new_masters(device):
    model, plain = fresh(device), fresh(device)
    with build(model, states="compact-8") as optimizer:
        optimizer.attach(model)
        train(model, optimizer, batches(device.torch_device, 2))
        with torch.no_grad():
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                param.copy_(other)
        optimizer.refresh_masters()
        states = optimizer.state_dict()["state"]
        for index, param in enumerate(model.parameters()):
            if index in states:
                assert torch.equal(states[index]["master_param"].cpu(), param.detach().float().cpu())
        assert_same_weights(model, plain)


@pytest.mark.parametrize(
    ("low_bits", "dtype", "bytes_each"),
    [
        (8, torch.bfloat16, 3.0625),
        (16, torch.bfloat16, 4.0625),
        (8, torch.float32, 2.0625),
        (8, torch.float16, 6.0625),
    ],
)
def test_as_many_bytes_travel_as_promised(device, low_bits, dtype, bytes_each):
    place = device.torch_device
    weight = torch.nn.Parameter(torch.zeros(512, 100, dtype=dtype, device=place))
    bias = torch.nn.Parameter(torch.zeros(512, dtype=dtype, device=place))
    before = host_book.live_bytes
    inner = torch.optim.AdamW([weight, bias], fused=True)
    with OptimizerStateOffloader(inner, chunk_bytes=12 * 6400, states=f"compact-{low_bits}") as optimizer:
        sent = [chunk.storage.nbytes for chunk in optimizer.streamed.chunks if not chunk.resident]
        assert sum(sent) == bytes_each * weight.numel()
        assert host_book.live_bytes - before == pytest.approx(sum(sent), abs=256 * len(sent))


@pytest.mark.parametrize("fraction", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_device_bytes_between_steps_are_the_ring_and_what_stays(device, fraction):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(8)))
    model.to(device.torch_device)
    matrices, vectors = 8 * 256 * 256, 8 * 256
    chunk_elements = 2**14

    def steps(count):
        for _ in range(count):
            model(torch.randn(4, 256, device=device.torch_device, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        gc.collect()

    gc.collect()
    with Ledger(device, track=model.parameters()) as ledger:
        base = ledger.device_bytes
        optimizer = OptimizerStateOffloader(
            torch.optim.AdamW(model.parameters(), fused=True),
            fraction=fraction,
            chunk_bytes=49 * 1024,
            states="compact-8",
        )
        steps(2)
        # Exact states of vectors, and the fp32 gradients of a chunk of them.
        stays = 3.0625 * (1 - fraction) * matrices + 16 * vectors
        extra = ledger.device_bytes - base
        # An allocator on a GPU gives each of the counters and numbers 512 bytes.
        counters = 64 * 512 if device.is_accelerator else 8 * 2**10
        assert extra == pytest.approx(stays + 3 * 3.0625 * chunk_elements, rel=0.01, abs=counters)
        optimizer.close()


@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_three_shares_with_a_compact_one_resume_to_the_bit(device, backward_overlap, tmp_path):
    data = batches(device.torch_device, 5)
    whole, resumed = twins(device)
    options = {
        "split": (0.2, 0.5, 0.3),
        "streaming": COMPACT,
        "cpu": CpuUpdate(threads=2, bucket_elements=1024),
        "backward_overlap": backward_overlap,
    }
    with hybrid(whole, **options) as one, hybrid(resumed, **options) as other:
        one.attach(whole)
        other.attach(resumed)
        train(whole, one, data[:2])
        torch.save({"optimizer": one.state_dict(), "model": whole.state_dict()}, tmp_path / "saved.pt")
        losses = train(whole, one, data[2:])
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        assert train(resumed, other, data[2:]) == losses
        one.synchronize()
        other.synchronize()
        assert_same_weights(whole, resumed)
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"states": "compact-12"}, "states is 'compact-12'; expected one of exact, .*compact-16"),
        (
            {"states": "compact-8", "offload_masters": False},
            "states is 'compact-8' with offload_masters False",
        ),
        (
            {"states": "compact-8", "chunk_bytes": 3000},
            "chunk_bytes is 3000; expected 3104 or more, 512 elements",
        ),
        (
            {"states": "compact-8", "wraps": torch.optim.SGD, "hyper": {"lr": 0.1, "momentum": 0.9}},
            "states is 'compact-8' for SGD; expected Adam",
        ),
    ],
)
def test_bad_options_are_named(device, options, words):
    with pytest.raises(ValueError, match=words):
        build(fresh(device), **options)


@pytest.mark.parametrize(
    ("module", "states"), [("compact_kernel", "compact-8"), ("rounded_kernel", "bf16-moments")]
)
def test_the_kernel_finds_everything_at_multiples_of_16_bytes(monkeypatch, interpreted, module, states):
    """Triton loads and stores 16 bytes at once there, and builds another kernel for other addresses."""
    kernel = interpreted(module)
    device, update, offsets = Device.of("cpu"), kernel.update, []

    def watched(*given):
        tensors = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
        offsets.extend(each.data_ptr() % 16 for each in tensors)
        update(*given)

    monkeypatch.setattr(kernel, "update", watched)
    monkeypatch.setattr(type(device), "compiles", True)
    model = fresh(device)
    with build(model, states=states, fraction=0.6, chunk_bytes=6000, max_grad_norm=1.0) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, batches(device.torch_device, 2))
    assert offsets
    assert not any(offsets)


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_kernel_that_finds_no_memory_to_be_loaded_into_is_launched_again(
    monkeypatch, interpreted, fails_at
):
    """No piece is updated twice, and none is left out."""
    kernel = interpreted("compact_kernel")
    device, update = Device.of("cpu"), kernel.update
    monkeypatch.setattr(type(device), "compiles", True)
    model, plain = twins(device)
    options = {"states": "compact-8", "chunk_bytes": 6000, "max_grad_norm": 0.5}
    with build(model, **options) as optimizer, build(plain, **options) as other:
        data = batches(device.torch_device, 3)
        for net, taken in ((model, optimizer), (plain, other)):
            train(net, taken, data[:1])
        launched = []

        def failing(operands, scalars, constants):
            launched.append(operands)
            if len(launched) == fails_at + 1:
                raise torch.OutOfMemoryError("no memory for the launch")
            update(operands, scalars, constants)

        model(data[1]).square().mean().backward()
        with monkeypatch.context() as once:
            once.setattr(kernel, "update", failing)
            optimizer.step()
            optimizer.synchronize()
        optimizer.zero_grad()
        plain(data[1]).square().mean().backward()
        other.step()
        other.zero_grad()
        for net, taken in ((model, optimizer), (plain, other)):
            train(net, taken, data[2:])
        assert_same_weights(model, plain)


@pytest.mark.parametrize("states", ["compact-8", "compact-16"])
def test_compact_masters_that_lie_between_two_weights_survive_a_load_of_the_model(device, states):
    """Compact states round such ties away from zero, where other masters are rounded to even."""
    data = batches(device.torch_device, 5)
    model = fresh(device)
    with build(model, states=states) as optimizer:
        train(model, optimizer, data)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        masters = [state["master_param"] for state in saved[1]["state"].values()]
        for master in masters:
            # Every one: no run is long enough for ties of 16 bits.
            master.view(torch.int32).bitwise_and_(-0x10000).bitwise_or_(0x8000)
        optimizer.load_state_dict(saved[1])
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        found = optimizer.state_dict()["state"]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert all(map(torch.equal, masters, (state["master_param"] for state in found.values())))
