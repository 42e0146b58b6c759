import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.device import Device
from reference_impl.optimizers import packing

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000,
    0x007FFFFF, 0x00800000, 0x3F7F8000, 0x3F808000, 0x3F808001, 0xBF7F8000, 0xBF808000, 0x7F7F7FFF,
    0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7F808000, 0x7FC00000,
    0x7FFF8000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF,
]  # fmt: skip
BITS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)), min_size=1, max_size=64)


def as_int32(bits):
    return torch.from_numpy(numpy.array(bits, dtype=numpy.uint32).view(numpy.int32).copy())


def operands(masters, *, moments, halved=True, seed=0):
    """What `pack` takes: masters as given, moments of any finite value, `exp_avg_sq` not negative."""
    generator = torch.Generator().manual_seed(seed)
    numel = masters.numel()
    wide = [torch.randn(numel, generator=generator), torch.rand(numel, generator=generator) ** 8]
    stored = [torch.zeros(numel, dtype=moments) for _ in wide]
    halves = packing.Halves(*(torch.zeros(numel, dtype=torch.int16) for _ in range(2)), masters.clone())
    return (
        halves if halved else None,
        [packing.integers(each) for each in stored],
        [each.view(torch.int32) for each in wide],
    )


@given(BITS)
@settings(deadline=None)
def test_a_weight_and_half_a_master_make_the_master(bits):
    masters = as_int32(bits)
    high, low, flag = packing.split(masters)
    assert torch.equal(packing.join(high, low, flag), masters)
    floats = masters.view(torch.float32)
    rounded = floats.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(high[~floats.isnan()], rounded[~floats.isnan()])
    # The weight keeps what of a NaN is in the upper half.
    assert torch.equal(high[floats.isnan()], (masters >> 16).to(torch.int16)[floats.isnan()])


def test_a_tie_is_told_apart_by_the_flag_alone():
    down, up = (packing.split(as_int32([bits])) for bits in (0x3F808000, 0x3F7F8000))
    assert torch.equal(down[0], up[0])
    assert torch.equal(down[1], up[1])
    assert down[2].item() != up[2].item()


@given(BITS)
@settings(deadline=None)
def test_a_flag_changes_only_the_sign(bits):
    values = as_int32(bits) & 0x7FFFFFFF
    flag = torch.arange(values.numel()) % 2 == 0
    for stored in (values, (values >> 16).to(torch.int16)):
        marked = packing.with_flag(stored, flag)
        assert torch.equal(marked < 0, flag)
        assert torch.equal(packing.widen(marked, flagged=True), packing.widen(stored, flagged=False))


@given(BITS, st.integers(0, 2**16 - 1))
@settings(deadline=None)
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
    value = torch.full((numel,), 1 + 0.3 * 2**-7)
    step = torch.tensor(3.0)

    def rounded(first, step):
        stored = [torch.zeros(numel, dtype=torch.int16)]
        packing.pack(None, stored, [value.view(torch.int32)], torch.tensor(first), step)
        return stored[0].view(torch.bfloat16)

    one = rounded(0, step)
    # The standard deviation of the share that goes up is 4.5e-4.
    assert (one > 1).float().mean().item() == pytest.approx(0.3, abs=0.003)
    assert torch.equal(one, rounded(0, step))
    assert torch.equal(one[1000:], rounded(1000, step)[:-1000])
    other = rounded(0, step + 1)
    assert ((one > 1) & (other > 1)).float().mean().item() == pytest.approx(0.09, abs=0.003)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("halved", [True, False])
@pytest.mark.parametrize("numel", [64, 2**16 + 64])
def test_unpack_undoes_pack_and_packing_again_changes_nothing(device, moments, halved, numel):
    masters = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64).to(torch.int32)

    def moved(operands):
        halves, *lists = operands
        place = device.torch_device
        there = halves and packing.Halves(*(each.to(place) for each in halves))
        return there, *([each.to(place) for each in listed] for listed in lists)

    halves, stored, wide = moved(operands(masters, moments=moments, halved=halved))
    given_wide = [each.clone() for each in wide]
    first, step = (torch.tensor(each, device=device.torch_device) for each in (7, 2.0))
    packing.pack_on(device, halves, stored, wide, first, step)
    assert all(torch.equal(each, kept) for each, kept in zip(wide, given_wide, strict=True))
    sent = [each.clone() for each in (*stored, *(halves or ()))]
    if halves is not None:
        halves.masters.zero_()
    for each in wide:
        each.zero_()
    packing.unpack_on(device, halves, stored, wide)
    if halves is not None:
        assert torch.equal(halves.masters.cpu(), masters)
    for now, before in zip(wide, given_wide, strict=True):
        if moments == torch.float32:
            assert torch.equal(now, before)
        else:
            torch.testing.assert_close(
                now.view(torch.float32), before.view(torch.float32), rtol=2**-7, atol=0
            )
    # What bf16 holds is not rounded again: a skipped step changes nothing.
    packing.pack_on(device, halves, stored, wide, first, step + 1)
    assert all(torch.equal(now, before) for now, before in zip((*stored, *(halves or ())), sent, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_gives_the_same_bits(moments):
    """The CPU's compiler stands in for CUDA's: the source is the same. It takes about half a minute to build."""
    masters = as_int32(EDGES * 40)
    first, step = torch.tensor(5), torch.tensor(9.0)
    results = []
    for pack, unpack in (
        (packing.pack, packing.unpack),
        (packing._compiled(packing.pack), packing._compiled(packing.unpack)),
    ):
        halves, stored, wide = operands(masters, moments=moments)
        pack(halves, stored, wide, first, step)
        halves.masters.zero_()
        unpack(halves, stored, wide)
        results.append([*halves, *stored, *wide])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert torch.equal(results[0][2], masters)


@pytest.mark.cuda
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_gives_the_bits_of_the_twin(moments):
    """States stand in one buffer, as in a slot, at several sizes of one compiled kernel."""
    device = Device.of("cuda")
    for numel in (64, 4096, 100_032):
        masters = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64).to(torch.int32)
        kept, stored, wide = operands(masters, moments=moments)
        size = numel * moments.itemsize
        slot = torch.zeros(2 * numel + 2 * size, dtype=torch.uint8, device="cuda")
        low = slot[: 2 * numel].view(torch.int16)
        places = [packing.integers(part.view(moments)) for part in slot[2 * numel :].split(size)]
        halves = packing.Halves(torch.zeros(numel, dtype=torch.int16, device="cuda"), low, masters.to("cuda"))
        moved = [each.to("cuda") for each in wide]
        for step in (1.0, 2.0):
            packing.pack_on(Device.of("cpu"), kept, stored, wide, torch.tensor(64), torch.tensor(step))
            packing.unpack_on(Device.of("cpu"), kept, stored, wide)
            on_device = torch.tensor(64, device="cuda"), torch.tensor(step, device="cuda")
            packing.pack_on(device, halves, places, moved, *on_device)
            packing.unpack_on(device, halves, places, moved)
            for there, here in zip((*halves, *places, *moved), (*kept, *stored, *wide), strict=True):
                assert torch.equal(there.cpu(), here)
