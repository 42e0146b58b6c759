# SPDX-License-Identifier: Apache-2.0
import ast
import contextlib
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.device import CpuTwin, Device, device_is_lost
from reference_impl.device.cuda import CachingAllocator, parts_of

REFERENCE_IMPL = Path(__file__).resolve().parents[2] / "reference_impl"


def knows_cuda(path):
    """The lines of a file that name torch.cuda, or ask a device, a tensor or a text whether it is CUDA."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_torch_cuda = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
        is_question = isinstance(node, ast.Attribute) and node.attr == "is_cuda"
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and "torch.cuda" in ast.unparse(node)
        is_comparison = isinstance(node, ast.Compare) and any(
            isinstance(each, ast.Constant) and "cuda" in str(each.value).lower()
            for each in [node.left, *node.comparators]
        )
        if is_torch_cuda or is_question or is_import or is_comparison:
            yield node.lineno


def test_one_module_knows_cuda():
    """Another accelerator is one more class."""
    found = {
        str(path.relative_to(REFERENCE_IMPL)) for path in REFERENCE_IMPL.rglob("*.py") if [*knows_cuda(path)]
    }
    assert found == {"device/cuda.py"}


def test_another_accelerator_is_one_class(monkeypatch):
    monkeypatch.setattr(Device, "classes", dict(Device.classes))

    class Toy(CpuTwin, torch_type="meta"):
        is_accelerator = True

    assert type(Device.of("meta")) is Toy
    assert Device.available("meta") is Device.of("meta")


def test_of_returns_one_device_for_each_torch_device(device):
    assert Device.of(device.torch_device) is device


def test_of_refuses_other_types_by_name():
    with pytest.raises(ValueError, match="meta"):
        Device.of("meta")


def test_the_default_is_an_accelerator_if_there_is_one():
    assert Device.available().is_accelerator == torch.cuda.is_available()
    assert Device.available("cpu") is Device.of("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_an_accelerator_that_is_not_there_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"device 'cuda': torch .* sees no CUDA device; expected one; try cpu"
    ):
        Device.available("cuda")


def test_marks_keep_time(device):
    began = device.mark()
    torch.ones(1000, device=device.torch_device).sum()
    assert 0 <= began.seconds_until(device.mark()) < 10


def test_copies_round_trip(device):
    source = torch.randn(1000, device=device.torch_device)
    host = torch.empty(1000, pin_memory=device.is_accelerator)
    target = torch.empty_like(source)
    copied = device.copy_out(host, source, after=[device.record()])
    device.wait(device.copy_in(target, host, after=[copied, device.record()]))
    assert torch.equal(source, target)


@pytest.mark.cuda
@pytest.mark.parametrize("each_mib", [3, 11, 30])
def test_an_allocator_keeps_to_its_limit(each_mib):
    """Also if its segments grow by whole pages without its asking."""
    allocator = Device.of("cuda").allocator
    allocator.free_bytes()
    limit_bytes = torch.cuda.memory_reserved() + 200 * 2**20
    allocator.limit(limit_bytes)
    taken = []
    try:
        with pytest.raises(torch.OutOfMemoryError):
            taken.extend(torch.empty(each_mib * 2**20, dtype=torch.uint8, device="cuda") for _ in range(100))
        assert limit_bytes - 64 * 2**20 < torch.cuda.memory_reserved() <= limit_bytes
    finally:
        allocator.limit(None)


class Somebody:
    """Waits for small copies."""


@pytest.mark.cuda
def test_copy_waits_for_its_event():
    device = Device.of("cuda")
    source = torch.zeros(1 << 20, device="cuda")
    host = torch.empty(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    source.fill_(1)
    device.copy_out(host, source, after=[device.record()]).synchronize()
    assert host.min() == 1


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["out", "in"])
def test_gigabytes_let_a_small_copy_through(way):
    """A copy engine stays on a stream while anything on it is ready, so large copies have to give way."""
    device, somebody = Device.of("cuda"), Somebody()
    device.latency_sensitive.add(somebody)
    host = torch.empty(2**27, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    # Below 24 kB a copy does not need the engine.
    small, small_there = torch.empty(2**14, pin_memory=True), torch.zeros(2**14, device="cuda")
    torch.cuda._sleep(100_000_000)
    asleep = device.record()
    for _ in range(32):
        if way == "out":
            last = device.copy_out(host, there, after=[asleep])
        else:
            last = device.copy_in(there, host, after=[asleep])
    with device.on_d2h_for_threads() if way == "out" else device.on_h2d_of_weights():
        device.wait(asleep)
        (small if way == "out" else small_there).copy_(
            small_there if way == "out" else small, non_blocking=True
        )
        through = device.record()
    through.synchronize()
    assert not last.query()
    device.synchronize()


@pytest.mark.cuda
def test_a_batch_of_tokens_passes_a_long_copy_that_is_under_way():
    device = Device.of("cuda")
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    tokens = torch.zeros(4, 4096, dtype=torch.int64).pin_memory()
    torch.cuda._sleep(100_000_000)
    asleep = device.record()
    copied = device.copy_in(there, host, after=[asleep])
    with torch.cuda.stream(torch.cuda.Stream()):
        device.wait(asleep)
        tokens.to("cuda", non_blocking=True)
        through = device.record()
    through.synchronize()
    assert not copied.query()
    device.synchronize()


@pytest.mark.cuda
def test_a_long_copy_in_arrives_whole():
    device = Device.of("cuda")
    numel = 5 * 2**24 // 8 + 3
    host = torch.arange(numel).pin_memory()
    there = torch.empty(numel, dtype=torch.int64, device="cuda")
    device.wait(device.copy_in(there, host, after=[device.record()]))
    assert torch.equal(there, torch.arange(numel, device="cuda"))


@given(numel=st.integers(0, 200), part_bytes=st.integers(8, 100))
def test_parts_are_the_whole_tensor_in_order(numel, part_bytes):
    tensor = torch.arange(numel)
    parts = parts_of(tensor, part_bytes)
    assert torch.equal(torch.cat(parts), tensor)
    assert all(part.nbytes <= part_bytes for part in parts)


def test_a_tensor_that_is_not_flat_is_one_part():
    tensor = torch.zeros(4, 4)
    assert [part.shape for part in parts_of(tensor, 8)] == [tensor.shape]
    assert [part.shape for part in parts_of(torch.zeros(()), 8)] == [torch.Size([])]


@pytest.mark.cuda
def test_large_copies_out_take_turns_only_while_somebody_waits_for_small_ones(monkeypatch):
    """Waiting for one's turn costs up to 7 % of the link."""
    device = Device.of("cuda")
    # Optimizers of other tests may not be collected yet.
    monkeypatch.setattr(device, "latency_sensitive", weakref.WeakSet())

    def streams_of_copies():
        streams = set()
        for _ in range(4):
            with device.on_d2h(2**27):
                streams.add(device.current_stream_id())
        return streams

    streams_of_copies()
    assert len(streams_of_copies()) == 1
    somebody = Somebody()
    device.latency_sensitive.add(somebody)
    assert len(streams_of_copies()) == 2
    del somebody
    assert len(streams_of_copies()) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("is_anybody_waiting", [False, True])
def test_copies_of_one_direction_stay_in_order(is_anybody_waiting):
    device, somebody = Device.of("cuda"), Somebody()
    if is_anybody_waiting:
        device.latency_sensitive.add(somebody)
    host = [torch.full((2**25,), value, dtype=torch.uint8, pin_memory=True) for value in range(6)]
    target = torch.empty(2**25, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(50_000_000)
    asleep = device.record()
    for index, each in enumerate(host):
        last = device.copy_in(target, each, after=[] if index else [asleep])
    device.wait(last)
    assert (target == 5).all()


@pytest.mark.cuda
def test_streams_are_restored_from_within_each_other_and_after_an_error():
    device = Device.of("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with contextlib.suppress(KeyError), device.on_d2h():
            with device.on_h2d():
                assert torch.cuda.current_stream() == device.h2d
            assert torch.cuda.current_stream() == device.d2h
            raise KeyError
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.cuda
def test_updates_have_a_stream_of_their_own():
    device = Device.of("cuda")
    current = device.current_stream_id()
    with device.on_update_stream():
        updates = device.current_stream_id()
    with device.on_update_stream():
        assert device.current_stream_id() == updates != current
    assert device.current_stream_id() == current


@pytest.mark.cuda
def test_record_follows_the_live_current_stream():
    device = Device.of("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        event = device.record()
    assert not event.query()
    side.synchronize()
    assert event.query()


@pytest.mark.cuda
def test_the_host_queues_hundreds_of_copies_and_waits_for_none():
    """A stream holds few events that threads may sleep on; a copy's own event is not of that kind."""
    device = Device.of("cuda")
    source, host = torch.zeros(1024, device="cuda"), torch.empty(1024, pin_memory=True)
    device.copy_out(host, source, after=[])
    torch.cuda._sleep(4_000_000_000)
    asleep = device.record()
    for _ in range(400):
        device.copy_out(host, source, after=[asleep])
    assert not asleep.query()
    device.synchronize()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (ValueError("CUDA error: of somebody else"), False),
    ],
)
def test_a_device_that_is_short_of_memory_is_not_lost(error, is_lost):
    assert device_is_lost(error) is is_lost


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ({}, ["expandable_segments:True", "expandable_segments:False"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            [
                "max_split_size_mb:64,expandable_segments:True",
                "max_split_size_mb:64,expandable_segments:False",
            ],
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
    ],
)
def test_segments_grow_unless_the_user_has_chosen(monkeypatch, said, chosen):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    allocator = CachingAllocator(torch.device("cuda", 0))
    before = allocator.segments_grow
    undo = allocator.let_segments_grow()
    assert allocator.segments_grow == (before or bool(chosen))
    allocator.let_segments_grow()()  # who finds it done undoes nothing
    undo()
    assert asked == chosen
    assert allocator.segments_grow == before


@pytest.mark.parametrize(
    ("said", "makes"),
    [
        ("", True),
        ("garbage_collection_threshold:0.8", True),
        # The long block would be nobody's: a piece shorter than the limit is not cut from it.
        ("max_split_size_mb:128", False),
        ("roundup_power2_divisions:4", False),
    ],
)
def test_room_is_made_where_the_allocator_cuts_it(monkeypatch, said, makes):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    made = []
    monkeypatch.setattr(torch, "empty", lambda size_bytes, **kwargs: made.append(size_bytes))
    CachingAllocator(torch.device("cuda", 0)).make_room([2**20, 2**20 + 1, 2**20 - 1, 2**20])
    assert made == ([2**20 + 512] if makes else [])


@pytest.mark.cuda
@pytest.mark.parametrize(
    "attached",
    [
        'apply_plan(model, adamw, {"execute": {"optimizer": {"offload_fraction": 1.0}}})',
        'TrainableLayerStreamer(model, adamw, device="cuda")',
    ],
)
def test_torchs_segments_grow_until_it_is_closed(attached):
    program = f"""
import torch
from reference_impl import TrainableLayerStreamer, apply_plan
def grows():
    return torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
adamw = torch.optim.AdamW(model.parameters(), fused=True)
with {attached}:
    assert grows()
    held = torch.ones(2**20, device="cuda")
assert not grows()
print(held.sum().item())
"""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(float(2**20))), done.stderr
