# SPDX-License-Identifier: Apache-2.0
"""bf16 weights in 12 bits: every bit comes back, and the rest of streaming is as without."""

import importlib
import io

import pytest
import torch
from late_device import LateTwin
from lora_trainee import Trainee
from torch import nn

from reference_impl import limit_pinned_memory
from reference_impl.device import Device
from reference_impl.memory.absent import is_unread
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.staged import Ring
from reference_impl.verification.model import Decoder, DecoderShape, add_lora
from reference_impl.weights import FrozenLayerStreamer, compressed_copy
from reference_impl.weights.compression import compress, decompress, decompress_on_host


def bits_of(values):
    return values.bfloat16().view(torch.int16)


def like_weights(numel):
    return torch.randn(numel) * 0.02


def with_outliers(numel):
    values = like_weights(numel)
    values[::97] = 0
    values[5::1009] *= 2.0**60
    values[6::1013] *= 2.0**-90
    values[7], values[8], values[9], values[10] = float("nan"), float("inf"), -float("inf"), -0.0
    return values


MEMORY = {
    **{f"{numel} weights": bits_of(like_weights(numel)) for numel in (4096, 4097, 4111, 5000, 70001)},
    "outliers": bits_of(with_outliers(70000)),
    "zeros": torch.zeros(5000, dtype=torch.int16),
    "ones": bits_of(torch.ones(5000)),
    "the smallest exponents": bits_of(like_weights(70000) * 2.0**-120),
    "the largest exponents": bits_of(like_weights(70000) * 2.0**127),
    "every pattern among weights": torch.cat(
        [torch.arange(-(2**15), 2**15).short(), bits_of(like_weights(3_000_000))]
    ),
}


@pytest.mark.parametrize("memory", MEMORY)
def test_every_bit_comes_back(device, memory):
    bits = MEMORY[memory].to(device.torch_device)
    form, compressed = compress(bits)
    assert compressed.numel() == form.size_bytes <= 0.9 * bits.nbytes
    target = torch.full_like(bits, 77)
    decompress(device, target, form, compressed)
    assert torch.equal(target, bits)


@pytest.mark.parametrize("memory", MEMORY)
def test_the_kernels_give_the_same_bits(memory):
    pytest.importorskip("triton", reason="needs triton, whose interpreter runs kernels on the CPU")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU that is here, in the test before")
    kernels = importlib.import_module("reference_impl.weights.compression_kernel")
    form, compressed = compress(MEMORY[memory])
    target = torch.full_like(MEMORY[memory], 77)
    kernels.decompress(target, form, *form.parts(compressed))
    assert torch.equal(target, MEMORY[memory])


@pytest.mark.parametrize("numel", [4096, 70001, 10**6])
def test_weights_take_twelve_bits(numel):
    _, compressed = compress(bits_of(like_weights(numel)))
    assert 0.75 <= compressed.numel() / (2 * numel) < 0.76


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(70000).view(torch.bfloat16),
        torch.randint(-(2**15), 2**15, (70000,)).short(),
        torch.randn(70000).to(torch.float8_e4m3fn).view(torch.int16),
        like_weights(4095).bfloat16(),
    ],
    ids=["fp32", "integers", "fp8", "few"],
)
def test_other_memory_is_left_alone(values):
    assert compress(values.view(torch.int16)) is None


def trainee_of(device, dtype=torch.bfloat16, **shape):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(layers=6, **shape)).to(device.torch_device, dtype)
    add_lora(model, rank=4)
    return Trainee(model, torch.randint(512, (2, 32), device=device.torch_device))


@pytest.fixture
def trainee(device):
    return trainee_of(device)


@pytest.fixture(params=[2**27, 2**15], ids=["long spans", "short spans"])
def spans(request, monkeypatch):
    """A storage is one span, or has several."""
    monkeypatch.setattr(compressed_copy, "DECOMPRESSED_BYTES", request.param)


def frozen(model):
    return {name: param for name, param in model.named_parameters() if not param.requires_grad}


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize(("prefetch", "resident_layers"), [(0, 0), (2, 0), (1, 3)])
def test_a_step_is_bitwise_the_same(trainee, prefetch, resident_layers):
    expected = [trainee.step(), trainee.step()]
    weights = {name: param.clone() for name, param in frozen(trainee.model).items()}
    with FrozenLayerStreamer(
        trainee.model, prefetch=prefetch, resident_layers=resident_layers, compress=True
    ):
        assert [trainee.step(), trainee.step()] == expected
    assert all(torch.equal(param, weights[name]) for name, param in frozen(trainee.model).items())
    assert trainee.step() == expected[0]


def test_memory_and_copies_are_three_quarters(trainee):
    with FrozenLayerStreamer(trainee.model, prefetch=1) as streamer:
        trainee.step()
        plain = streamer.report
    with FrozenLayerStreamer(trainee.model, prefetch=1, compress=True) as streamer:
        trainee.step()
        report = streamer.report
    assert report.streamed_bytes == plain.streamed_bytes
    assert report.loads == plain.loads
    assert 0.75 <= report.pinned_bytes / plain.pinned_bytes < 0.77
    assert 0.75 <= report.loaded_bytes / plain.loaded_bytes < 0.77


def test_the_device_holds_two_buffers_more(trainee, device):
    def peak_bytes(**options):
        with (
            FrozenLayerStreamer(trainee.model, prefetch=1, **options) as streamer,
            Ledger(device, track=(*trainee.model.parameters(), *trainee.model.buffers())) as ledger,
        ):
            trainee.step()
            ledger.reset_peak()
            trainee.step()
            return ledger.peak_device_bytes, streamer.report.window_bytes

    (plain, window), (compressed, longer_window) = peak_bytes(), peak_bytes(compress=True)
    buffers = longer_window - window
    longest = max(param.nbytes for param in frozen(trainee.model.layers).values())
    assert buffers == pytest.approx(2 * 0.9 * longest, abs=64)
    # CUDA's allocator rounds each up to 512 bytes; the CPU twin's ledger does not see them, which are older.
    assert compressed == plain or compressed - plain == pytest.approx(buffers, abs=2 * 512)


def test_a_budget_holds_the_buffers_too(trainee):
    budget = 3 * trainee.layer_bytes
    with FrozenLayerStreamer(trainee.model, budget_bytes=budget, prefetch=1, compress=True) as streamer:
        report = streamer.report
        assert budget - trainee.layer_bytes < report.resident_bytes + report.window_bytes <= budget
    with pytest.raises(ValueError, match="expected at least") as refused:
        FrozenLayerStreamer(trainee.model, budget_bytes=trainee.layer_bytes, prefetch=0, compress=True)
    least = int(str(refused.value).split("expected at least ")[1].split(",")[0])
    with FrozenLayerStreamer(trainee.model, budget_bytes=least, prefetch=0, compress=True) as streamer:
        assert streamer.report.resident_bytes + streamer.report.window_bytes <= least


def test_a_model_of_another_dtype_streams_as_it_is(device):
    trainee = trainee_of(device, torch.float32)
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1, compress=True) as streamer:
        assert trainee.step() == expected
        assert streamer.report.pinned_bytes == streamer.report.streamed_bytes


@pytest.mark.usefixtures("spans")
def test_little_pinned_memory(device, monkeypatch):
    """Blocks beyond the limit pass through the ring compressed."""
    trainee = trainee_of(device, hidden=256, ffn=512)
    expected = trainee.step()
    through_ring, copy_in = [], Ring.copy_in

    def counted(ring, target, host, *arguments):
        through_ring.append(host.nbytes)
        return copy_in(ring, target, host, *arguments)

    monkeypatch.setattr(Ring, "copy_in", counted)
    limit = 3 * trainee.layer_bytes
    with (
        limit_pinned_memory(limit),
        FrozenLayerStreamer(trainee.model, prefetch=1, compress=True) as streamer,
    ):
        assert trainee.step() == expected
        assert trainee.layer_bytes <= streamer.report.pinned_bytes <= limit
        assert through_ring
        assert max(through_ring) < 0.8 * max(param.nbytes for param in trainee.model.parameters())


def test_a_state_dict_is_read_where_it_is_used(trainee):
    """peft asks for all of it and saves adapters: the others must take no memory."""
    expected = {name: value.cpu().clone() for name, value in trainee.model.state_dict().items()}
    with FrozenLayerStreamer(trainee.model, prefetch=1, compress=True):
        state = trainee.model.state_dict()
        unread = [name for name, value in state.items() if is_unread(value)]
        assert sum("base" in name for name in unread) == 6 * 4
        adapters = {name: value for name, value in state.items() if ".lora" in name}
        torch.save(adapters, io.BytesIO())
        assert [name for name, value in state.items() if is_unread(value)] == unread
        shapes = {
            name: (value.shape, value.dtype, value.device.type, len(value)) for name, value in state.items()
        }
        assert shapes.keys() == expected.keys()
        assert [name for name, value in state.items() if is_unread(value)] == unread
        file = io.BytesIO()
        torch.save(state, file)
        assert not any(map(is_unread, state.values()))
        file.seek(0)
        loaded = torch.load(file)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        for found in (state, loaded):
            assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


READERS = {
    "clone": lambda value: value.clone(),
    "detach": lambda value: value.detach(),
    "cpu": lambda value: value.cpu(),
    "to": lambda value: value.to(torch.float32).to(torch.bfloat16),
    "numpy": lambda value: torch.from_numpy(value.view(torch.int16).numpy()).view(torch.bfloat16),
    "storage": lambda value: torch.empty(0, dtype=torch.bfloat16).set_(
        value.untyped_storage(), 0, value.shape
    ),
    "copy_": lambda value: torch.empty(value.shape, dtype=value.dtype).copy_(value),
    "out": lambda value: torch.cat([value[:1], value[1:]], out=torch.empty(0, dtype=value.dtype)),
    "Parameter": lambda value: nn.Parameter(value).data,
    "index": lambda value: torch.stack([value[index] for index in range(len(value))]),
    "state dict": lambda value: load_into(value),
}


def load_into(value):
    linear = nn.Linear(value.shape[1], value.shape[0], bias=False, dtype=value.dtype)
    linear.load_state_dict({"weight": value})
    return linear.weight.data


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_an_entry_gets_its_values(trainee, reader):
    name = "layers.2.qkv.base.weight"
    expected = trainee.model.get_parameter(name).detach().cpu().clone()
    with FrozenLayerStreamer(trainee.model, prefetch=0, compress=True):
        value = trainee.model.state_dict()[name]
        assert is_unread(value)
        assert torch.equal(READERS[reader](value), expected)
        assert not is_unread(value)


def test_entries_outlive_the_streamer(trainee):
    expected = {name: param.detach().cpu().clone() for name, param in frozen(trainee.model).items()}
    with FrozenLayerStreamer(trainee.model, prefetch=1, compress=True) as streamer:
        before = trainee.model.state_dict()
        streamed = [name for name, value in before.items() if is_unread(value)]
        with streamer.gathered(), torch.no_grad():
            for name in streamed:
                trainee.model.get_parameter(name).neg_()
        after = trainee.model.state_dict()
    assert streamed
    for name in streamed:
        assert torch.equal(before[name], expected[name])
        assert torch.equal(after[name], -expected[name])
        assert torch.equal(trainee.model.get_parameter(name).cpu(), -expected[name])


def test_a_kernel_that_fails_leaves_nothing_half_done(trainee, monkeypatch):
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=1, compress=True):
        with monkeypatch.context() as broken:
            calls = []

            def failing(*arguments):
                calls.append(arguments)
                if len(calls) == 3:
                    raise RuntimeError("no kernel")
                decompress(*arguments)

            broken.setattr(compressed_copy, "decompress", failing)
            with pytest.raises(RuntimeError, match="no kernel"):
                trainee.step()
        trainee.model.zero_grad()
        assert trainee.step() == expected


@pytest.mark.parametrize("compress", ["no", 1, None])
def test_compression_is_said(trainee, compress):
    with pytest.raises(TypeError, match=r"expected True or False; try compress=True"):
        FrozenLayerStreamer(trainee.model, compress=compress)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]
)
def test_late_copies_and_late_kernels(monkeypatch, seed):
    """A span is written to its buffer behind the kernel that reads the one before, and read behind its copy."""
    late = type("SeededTwin", (LateTwin,), {"seed": seed})
    monkeypatch.setitem(Device.classes, "cpu", late)

    def decompressed_late(device, target, form, compressed):
        storage = target.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()

        def write():
            assert (storage.data_ptr(), storage.nbytes()) == place, (
                "memory was freed that a kernel still writes"
            )
            decompress_on_host(target, form, compressed)

        device.do(write)

    monkeypatch.setattr(compressed_copy, "decompress", decompressed_late)
    monkeypatch.setattr(compressed_copy, "DECOMPRESSED_BYTES", 2**14)
    device = Device.of("cpu")
    assert isinstance(device, late)
    trainee = trainee_of(device)
    expected = trainee.step()
    with FrozenLayerStreamer(trainee.model, prefetch=seed % 3, compress=True) as streamer:
        for _ in range(3):
            assert trainee.step() == expected
        with streamer.gathered(trainee.layers[1]):
            pass
        assert trainee.step() == expected
    assert trainee.step() == expected


def test_weights_of_files_are_not_compressed(trainee):
    with pytest.raises(ValueError, match=r"host_limit_bytes=1000000.*expected one of them; try limit_pinned"):
        FrozenLayerStreamer(trainee.model, host_limit_bytes=10**6, compress=True)


def test_a_gpu_without_triton(trainee, device, monkeypatch):
    monkeypatch.setattr(type(device), "compiles", True)
    monkeypatch.setattr("reference_impl.device.base.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs triton.*try pip install triton, or compress=False"):
        FrozenLayerStreamer(trainee.model, compress=True)


def test_the_host_reads_what_it_wrote():
    """Tensors of a state dict may be read in pieces of any length."""
    bits = bits_of(with_outliers(3 * 2**17 + 11))
    form, compressed = compress(bits)
    target = torch.empty_like(bits)
    decompress_on_host(target, form, compressed)
    assert torch.equal(target, bits)
