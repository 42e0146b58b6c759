# SPDX-License-Identifier: Apache-2.0
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.device import Device
from reference_impl.optimizers.streamed import packing

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000,
    0x007FFFFF, 0x00800000, 0x3F7F8000, 0x3F808000, 0x3F808001, 0xBF7F8000, 0xBF808000, 0x7F7F7FFF,
    0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F808000, 0x7FC00000,
    0x7FFF8000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF,
]  # fmt: skip
BITS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)), min_size=1, max_size=64)


def as_int32(bits):
    return torch.from_numpy(numpy.array(bits, dtype=numpy.uint32).view(numpy.int32).copy())


def halves_of(masters, seed=0, *, apart=False):
    """Arguments of `pack`: masters as given, and any `exp_avg_sq`, which is not negative, or bits `apart`."""
    generator = torch.Generator().manual_seed(seed)
    high, low = (torch.zeros(masters.numel(), dtype=torch.int16) for _ in range(2))
    if apart:
        flags = torch.randint(256, (masters.numel() // 8,), generator=generator, dtype=torch.uint8)
        return packing.Halves(high, low, masters.clone(), flags)
    squares = torch.rand(masters.numel(), generator=generator) ** 8
    return packing.Halves(high, low, masters.clone(), packing.integers(squares))


@given(BITS)
def test_a_weight_and_half_a_master_make_the_master(bits):
    masters = as_int32(bits)
    high, low, flag = packing.split(masters)
    assert torch.equal(packing.join(high, low, flag), masters)
    floats = masters.view(torch.float32)
    rounded = floats.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(high[~floats.isnan()], rounded[~floats.isnan()])
    # The weight keeps the upper half of a NaN.
    assert torch.equal(high[floats.isnan()], (masters >> 16).to(torch.int16)[floats.isnan()])


def test_a_tie_is_told_apart_by_the_flag_alone():
    down, up = (packing.split(as_int32([bits])) for bits in (0x3F808000, 0x3F7F8000))
    assert torch.equal(down[0], up[0])
    assert torch.equal(down[1], up[1])
    assert down[2].item() != up[2].item()


@given(BITS)
def test_a_flag_changes_only_the_sign(bits):
    values = as_int32(bits) & 0x7FFFFFFF
    flag = torch.arange(values.numel()) % 2 == 0
    for stored in (values, (values >> 16).to(torch.int16)):
        marked = packing.with_flag(stored, flag)
        assert torch.equal(marked < 0, flag)
        assert torch.equal(packing.widen(marked, flagged=True), packing.widen(stored, flagged=False))


@given(BITS, st.integers(0, 2**16 - 1))
def test_stochastic_rounding_takes_a_neighbour(bits, noise):
    values = as_int32(bits)
    floats = values.view(torch.float32)
    result = packing.narrow(values, torch.full_like(values, noise)).view(torch.bfloat16)
    assert torch.equal(result.isnan(), floats.isnan())
    below = (values & ~0xFFFF).view(torch.float32)
    finite = floats.isfinite()
    assert result[finite].isfinite().all()
    exact = finite & (below == floats)
    assert torch.equal(result.float().view(torch.int32)[exact], values[exact])
    steps = (result.view(torch.int16).to(torch.int32) & 0x7FFF) - ((values >> 16) & 0x7FFF)
    assert ((steps[finite] == 0) | (steps[finite] == 1)).all()
    assert torch.equal(result[floats.isinf()].float(), floats[floats.isinf()])


def test_stochastic_rounding_is_right_on_average_and_the_same_every_time():
    numel = 2**20
    value = torch.full((numel,), 1 + 0.3 * 2**-7).view(torch.int32)
    step = torch.tensor(3.0)

    def rounded(first, step):
        noise = packing.noise(numel, torch.tensor(first), step)
        return [packing.narrow(value, each).view(torch.bfloat16) for each in noise]

    for moment, one in enumerate(rounded(0, step)):
        # The standard deviation of the share that goes up is 4.5e-4.
        assert (one > 1).float().mean().item() == pytest.approx(0.3, abs=0.003)
        assert torch.equal(one, rounded(0, step)[moment])
        assert torch.equal(one[1000:], rounded(1000, step)[moment][:-1000])
        for other in (rounded(0, step + 1)[moment], rounded(0, step)[1 - moment]):
            assert ((one > 1) & (other > 1)).float().mean().item() == pytest.approx(0.09, abs=0.003)


@pytest.mark.parametrize("numel", [64, 2**16 + 64])
@pytest.mark.parametrize("apart", [False, True])
def test_unpack_undoes_pack(device, numel, apart):
    masters = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64).to(torch.int32)
    masters[:24] = as_int32(EDGES * 64)[:24]
    halves = packing.Halves(*(each.to(device.torch_device) for each in halves_of(masters, apart=apart)))
    squares = halves.flagged.clone()
    packing.Packer(device).pack(halves)
    if not apart:
        assert torch.equal(halves.flagged & 0x7FFFFFFF, squares)
    sent = [each.clone() for each in halves]
    halves.masters.zero_()
    packing.Packer(device).unpack(halves)
    assert torch.equal(halves.masters.cpu(), masters)
    assert torch.equal(halves.flagged, sent[3] if apart else squares)
    # A skipped step changes nothing.
    packing.Packer(device).pack(halves)
    assert all(torch.equal(now, before) for now, before in zip(halves, sent, strict=True))


# A length that fills no program of the kernel, and one of several.
@pytest.mark.parametrize("repeats", [1, 100])
@pytest.mark.parametrize("apart", [False, True])
def test_the_kernel_makes_the_bits_of_the_twin(interpreted, repeats, apart):
    kernel = interpreted("halves_kernel")
    masters = as_int32(EDGES * repeats)
    # A chunk's length.
    masters = masters[: len(masters) // 8 * 8] if apart else masters
    twin, other = halves_of(masters, apart=apart), halves_of(masters, apart=apart)
    for name in ("pack", "unpack", "pack"):
        getattr(packing.Packer(Device.of("cpu")), name)(twin)
        getattr(kernel, name)(other)
        for here, there in zip(twin, other, strict=True):
            assert torch.equal(here, there), name
        assert torch.equal(other.masters, masters)


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("skips", [False, True])
def test_the_kernel_rounds_a_moment_as_the_twin(interpreted, moment, skips):
    kernel = interpreted("halves_kernel")
    values = as_int32(EDGES * 100)
    numbers = (torch.tensor(2**31 - 1000), torch.tensor(5.0), torch.tensor(skips))
    twin, other = (
        packing.Rounding(
            torch.ones(len(values), dtype=torch.int16), values, *numbers, shift=300, moment=moment
        )
        for _ in range(2)
    )
    packing.Packer(Device.of("cpu")).round(twin)
    kernel.round_moment(other)
    assert torch.equal(twin.stored, other.stored)
    assert bool((twin.stored == 1).all()) == skips


@pytest.mark.cuda
def test_cuda_gives_the_bits_of_the_twin():
    """States are in one buffer, as in a slot, at several sizes."""
    for numel in (64, 4096, 100_032):
        masters = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64).to(torch.int32)
        kept = halves_of(masters)
        slot = torch.zeros(6 * numel, dtype=torch.uint8, device="cuda")
        low, flagged = slot[: 2 * numel].view(torch.int16), slot[2 * numel :].view(torch.int32)
        flagged.copy_(kept.flagged)
        moved = packing.Halves(kept.high.to("cuda"), low, masters.to("cuda"), flagged)
        for name in ("pack", "unpack", "pack"):
            getattr(packing.Packer(Device.of("cpu")), name)(kept)
            getattr(packing.Packer(Device.of("cuda")), name)(moved)
            for there, here in zip(moved, kept, strict=True):
                assert torch.equal(there.cpu(), here)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([torch.float32, torch.int64, torch.int16]))
def test_rows_begin_where_a_kernel_wants_them(count, width, dtype):
    table = torch.arange(count * width).reshape(count, width).to(dtype)
    rows = packing.aligned_rows(table)
    assert all(row.data_ptr() % 16 == 0 for row in rows)
    assert torch.equal(torch.stack(list(rows)), table)
