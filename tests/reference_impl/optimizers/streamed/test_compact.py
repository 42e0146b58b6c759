# SPDX-License-Identifier: Apache-2.0
"""The compact format: bounds of its errors, forbidden results, and the same bytes as a simple implementation."""

import numpy
import pytest
import torch
from compact_reference import CompactState, root_codes, rounded_to_24_bits, signed_codes, weight_of
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.streamed import compact, packing
from reference_impl.optimizers.streamed.packing import RoundedUpdate

GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "maximize": False}
LARGEST, LEAST_NORMAL = 0x7F7FFFFF, 0x00800000
EDGES = [0, 1, 0x7FFFFF, LEAST_NORMAL, 0x3F7F8000, 0x3F808000, 0x7F7F0000, 0x7F7F8000, LARGEST]
# Magnitudes from all of fp32, or of a few of its binades, so that a block's scale suits more than one of its values.
FINITE = st.one_of(
    st.integers(0, LARGEST),
    st.sampled_from(EDGES),
    st.integers(0x3F000000, 0x40000000),
    st.integers(0, 0x01000000),
)
SIGNED = st.tuples(FINITE, st.sampled_from([0, -(2**31)])).map(sum)
# A block is written down by its first elements.
SHORT = {"min_size": 1, "max_size": 8}


def block(bits):
    """One row of 64."""
    padded = numpy.zeros((1, 64), dtype=numpy.int64)
    padded[0, : len(bits)] = bits
    return torch.from_numpy(padded).to(torch.int32)


def encoded(name, bits, noise):
    """Codes, scales and the values that they stand for."""
    scales, codes = {
        "exp_avg": (compact.signed_scales, compact.signed_codes),
        "exp_avg_sq": (compact.root_scales, compact.root_codes),
    }[name]
    scale = scales(bits)
    code = codes(bits, scale, noise)
    return code, scale, compact.MOMENTS[name].unpack(code, scale.to(torch.int16))


@given(st.lists(SIGNED, **SHORT), st.integers(0, 63))
def test_a_code_of_the_first_moment_is_next_to_its_value(bits, noise):
    bits = block(bits)
    values = bits.view(torch.float32)
    code, scale, restored = encoded("exp_avg", bits, noise)
    step = (scale << 16).view(torch.float32).double()
    # No bf16 is above the last few numbers of fp32.
    assert (step >= values.abs().double().clamp(max=2.0**127 * (2 - 2**-7))).all()
    size = values.double().abs()
    wanted = 254 * size / (step + size).clamp(min=2.0**-100)
    # One of the 64 parts into which noise cuts a code, and half of one for its own rounding.
    assert ((code.double().abs() - wanted).abs() < 1 + 2**-6).all()
    assert ((code < 0) <= (values < 0)).all()
    assert ((restored.double() - values.double()).abs() <= step * 2 / 126 * 1.02).all()
    assert restored.isfinite().all()


@given(st.lists(FINITE, **SHORT), st.integers(0, 2**14 - 1))
def test_a_code_of_the_second_moment_is_next_to_its_root_and_never_0(bits, noise):
    bits = block(bits)
    values = bits.view(torch.float32).double()
    code, scale, restored = encoded("exp_avg_sq", bits, noise)
    largest = (scale << 16).view(torch.float32).double().clamp(min=2.0**-108)
    wanted = 255 * (values / largest).sqrt()
    assert (((code.double() - wanted).abs() < 1 + 2**-10) | ((code == 1) & (wanted < 1))).all()
    assert ((restored > 0) == (values > 0)).all()
    assert restored.isfinite().all()
    # A value other than 0 is no subnormal: a device may flush these.
    assert (restored[restored > 0] >= 2.0**-124).all()


@pytest.mark.parametrize("name", compact.MOMENTS)
@given(st.lists(SIGNED, **SHORT), st.integers(0, 63))
def test_what_was_unpacked_is_packed_without_loss(name, bits, noise):
    """So a checkpoint of fp32 values resumes to the bit, though it holds neither codes nor scales."""
    values = block(bits) if name == "exp_avg" else block(bits) & 0x7FFFFFFF
    _, _, restored = encoded(name, values, noise if name == "exp_avg" else noise << 8)
    codes, scales = compact.MOMENTS[name].pack(restored)
    assert torch.equal(compact.MOMENTS[name].unpack(codes, scales), restored)


@given(st.lists(SIGNED, **SHORT), st.integers(0, 63), st.sampled_from([20, 22]))
def test_what_releases_that_cut_quotients_off_have_saved_is_packed_to_their_codes(bits, noise, kept_bits):
    """They made c / (254 - c) of integers; the scale was then one step too large, and all codes were made anew."""
    codes, scales, _ = encoded("exp_avg", block(bits), noise)
    wide = codes.to(torch.int32)
    share = torch.div(wide.abs() << kept_bits, 254 - wide.abs(), rounding_mode="trunc").to(torch.float32)
    saved = share * ((scales << 16).view(torch.float32) * 2.0**-kept_bits) * wide.sign()
    packed, its_scales = compact.pack_signed(saved)
    assert torch.equal(
        compact.signed_values(packed, its_scales), compact.signed_values(codes, scales.to(torch.int16))
    )


@pytest.mark.parametrize("name", compact.MOMENTS)
@pytest.mark.parametrize("odd", [0x7F800000, 0x7FC00000, 0x7F800001])
def test_infinity_and_nan_spread_to_their_block_and_no_further(name, odd):
    bits = torch.full((3, 64), 0x3F800000, dtype=torch.int32)
    bits[1, 5] = odd
    bits[1, 6:9] = 0
    _, _, restored = encoded(name, bits, 0)
    assert (restored[1].isinf() if odd == 0x7F800000 else restored[1].isnan()).all()
    for clean in (0, 2):
        torch.testing.assert_close(restored[clean], torch.ones(64), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", compact.MOMENTS)
def test_zero_stays_zero(name):
    """Whatever the noise; and bytes of zero, with which a chunk begins, are zeros."""
    _, _, restored = encoded(name, torch.zeros(2, 64, dtype=torch.int32), 63)
    assert not restored.any()
    codes, scales = torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.int16)
    assert not compact.MOMENTS[name].unpack(codes, scales).any()


@given(st.lists(SIGNED, **SHORT))
def test_noise_is_right_on_average(bits):
    """Over all possible noises, the mean code is the value's, up to the noise's steps of a code."""
    bits = block(bits).expand(64, -1).contiguous()
    noise = torch.arange(64, dtype=torch.int32)[:, None]
    codes, scale, _ = encoded("exp_avg", bits, noise)
    size, step = bits[:1].view(torch.float32).double().abs(), (scale[:1] << 16).view(torch.float32).double()
    wanted = (254 * size / (step + size).clamp(min=2.0**-100)).clamp(max=127)
    assert ((codes.double().abs().mean(0) - wanted).abs() <= 2**-6).all()
    masters = bits[:1].expand(256, -1)
    rounded = compact.rounded(masters, torch.arange(256, dtype=torch.int32)[:, None])
    mean = rounded.double().mean(0)
    inside = (masters[0] & 0x7FFFFFFF) <= LARGEST - 255
    assert torch.equal(mean[inside], masters[0].double()[inside])


ANY = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, *EDGES]),
    st.sampled_from([0x3F7F8000, 0x3F808000, -0x407F8000]),
)


@given(st.lists(ANY, min_size=1, max_size=64), st.integers(0, 255))
def test_a_weight_and_low_bits_make_the_master(bits, noise):
    bits = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    shorter = compact.rounded(bits, noise)
    for exact, dtype in ((bits, torch.int16), (shorter, torch.int8)):
        high, low = compact.split(exact, dtype)
        joined = compact.join(high, low)
        number = ~values.isnan()
        assert low.dtype == dtype
        assert torch.equal(joined[number], exact[number])
        assert joined.view(torch.float32)[~number].isnan().all()
        weights = high.view(torch.bfloat16)
        assert weights[~number].isnan().all()
        finite = values.isfinite()
        wanted = torch.from_numpy(weight_of(exact.view(torch.float32)[finite].numpy()).copy())
        assert torch.equal(weights[finite].float(), wanted)
    finite = values.isfinite()
    assert shorter.view(torch.float32)[finite].isfinite().all()
    simply = rounded_to_24_bits(values[finite].numpy(), noise)
    assert torch.equal(shorter.view(torch.float32)[finite], torch.from_numpy(simply.copy()))
    # A master that has 24 bits already stays, whatever the noise: a checkpoint loads it to the bit.
    assert torch.equal(compact.rounded(shorter, noise), shorter)


@given(st.lists(SIGNED, **SHORT), st.integers(0, 63), st.integers(0, 2**14 - 1))
def test_codes_are_those_of_the_simple_way(bits, noise, root_noise):
    bits = block(bits)
    values = bits.view(torch.float32)
    ours = compact.signed_codes(bits, compact.signed_scales(bits), noise)
    theirs, _ = signed_codes(values.numpy(), noise)
    assert torch.equal(ours.to(torch.int64), torch.from_numpy(theirs))
    squares = bits & 0x7FFFFFFF
    ours = compact.root_codes(squares, compact.root_scales(squares), root_noise)
    theirs, _ = root_codes(squares.view(torch.float32).numpy(), root_noise)
    assert torch.equal(ours.to(torch.int64), torch.from_numpy(theirs))


class Trained:
    """One piece as it is kept, updated as it is on `device`."""

    def __init__(self, device, low_bits, numel, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        weight = (torch.randn(numel, generator=generator) / 8).to(dtype)
        self.simple = CompactState(weight, 0, low_bits)
        self.device, self.kernel = device, RoundedUpdate(device, Adam())
        self.weight = weight.to(device.torch_device)
        whole = -(-numel // 64) * 64
        kinds = {8: torch.int8, 16: torch.int16}
        is_bf16 = dtype == torch.bfloat16
        self.low = self._zeros(whole, kinds[low_bits]) if is_bf16 else None
        self.master = None if is_bf16 else self.weight.float()
        self.codes = [self._zeros(whole, torch.int8), self._zeros(whole, torch.uint8)]
        self.scales = [self._zeros(whole // 64, torch.int16) for _ in range(2)]

    def _zeros(self, count, dtype):
        return torch.zeros(count, dtype=dtype, device=self.device.torch_device)

    def operands(self, gradient):
        weight = self.weight if self.low is None else self.weight.view(torch.int16)
        return compact.CompactOperands(
            weight=None if self.weight is self.master else weight,
            low=self.low,
            master=self.master,
            gradient=gradient.to(self.device.torch_device),
            codes=self.codes,
            scales=self.scales,
        )

    def scalars(self, count, *, found_inf=0.0, first=0, group=GROUP):
        step, place = torch.tensor(float(count)), self.device.torch_device
        numbers = Adam().numbers_by_step(group, step[None])[0]
        order = torch.tensor(packing.number(0, first))
        each = (order, step, numbers, torch.tensor(1.7), torch.tensor(found_inf))
        return packing.Scalars(*(number.to(place) for number in each))

    def step(self, gradient, count, *, part=None, **options):
        part = part or slice(0, gradient.numel())
        scalars = self.scalars(count, first=part.start, **options)
        self.kernel.update(self.operands(gradient).part(part), **scalars._asdict())

    def stored(self):
        kept = (self.weight, *self.codes, *self.scales, self.low, self.master)
        return [each.cpu().clone() for each in kept if each is not None]


def gradients(numel, count=3, dtype=torch.bfloat16):
    """Of very different sizes within a block, and some that are 0 for good."""
    generator = torch.Generator().manual_seed(2)
    sizes = 10.0 ** torch.randint(-9, 2, (numel,), generator=generator)
    sizes[::7] = 0
    return [(torch.randn(numel, generator=generator) * sizes).to(dtype) for _ in range(count)]


KINDS = [(8, torch.bfloat16), (16, torch.bfloat16), (8, torch.float32), (8, torch.float16)]


@pytest.mark.parametrize(("low_bits", "dtype"), KINDS)
@pytest.mark.parametrize("numel", [64, 1, 200, 2**16 + 70])
def test_the_update_is_that_of_the_simple_way(low_bits, dtype, numel):
    trained = Trained(Device.of("cpu"), low_bits, numel, dtype)
    for count, gradient in enumerate(gradients(numel, dtype=dtype), start=1):
        trained.step(gradient, count)
        weight = trained.simple.step(gradient, GROUP, grad_scale=torch.tensor(1.7))
        assert torch.equal(trained.weight, weight)
    for moment, codes in enumerate(trained.codes):
        assert torch.equal(codes.to(torch.int64), torch.from_numpy(trained.simple.codes[moment]).flatten())
    for ours, theirs in zip(trained.scales, trained.simple.scales, strict=True):
        assert torch.equal(ours.view(torch.bfloat16).double(), torch.from_numpy(theirs).flatten())


@pytest.mark.parametrize("low_bits", [8, 16])
def test_a_step_that_is_skipped_changes_no_byte(device, low_bits):
    trained = Trained(device, low_bits, 4096 + 24)
    for count, gradient in enumerate(gradients(4096 + 24), start=1):
        trained.step(gradient, count)
    before = trained.stored()
    for bad in (float("nan"), float("inf")):
        trained.step(torch.full((4096 + 24,), bad, dtype=torch.bfloat16), 3, found_inf=1.0)
    assert all(torch.equal(now, was) for now, was in zip(trained.stored(), before, strict=True))


@pytest.mark.parametrize("low_bits", [8, 16])
def test_the_cut_of_pieces_changes_no_byte(device, low_bits):
    numel = 2**16 + 128
    whole, cut = (Trained(device, low_bits, numel) for _ in range(2))
    (gradient,) = gradients(numel, 1)
    whole.step(gradient, 1)
    for part in (slice(0, 64), slice(64, 2**16), slice(2**16, numel)):
        cut.step(gradient, 1, part=part)
    assert all(torch.equal(one, other) for one, other in zip(whole.stored(), cut.stored(), strict=True))


def test_small_updates_add_up(device):
    """Of a master of 24 bits the least step is 2**-16 of it; to nearest it would never move at all."""
    weight = torch.nn.Parameter(torch.full((64, 64), 0.02, dtype=torch.bfloat16, device=device.torch_device))
    trained = Trained(device, 8, 4096)
    trained.weight = weight.detach().flatten()
    group = {**GROUP, "lr": 1e-7, "weight_decay": 0.0}
    start = trained.weight.double().mean().item()
    for count in range(1, 101):
        trained.step(torch.ones(4096, dtype=torch.bfloat16), count, group=group)
    masters = compact.join(trained.weight.view(torch.int16), trained.low).view(torch.float32).double()
    # 4,096 elements; the spacing is 4.8e-7, so the mean has a standard deviation of 2e-8 or so.
    assert start - masters.mean().item() == pytest.approx(1e-5, rel=0.03)


def assert_same(one, other):
    for ours, theirs in zip(one.stored(), other.stored(), strict=True):
        assert torch.equal(_bytes(ours), _bytes(theirs))


# A length that fills no block, one of a block, and one of many programs of the kernel.
NUMELS = (1, 64, 4096 + 24)


@pytest.mark.parametrize(("low_bits", "dtype"), KINDS)
def test_the_kernel_makes_the_bytes_of_the_twin(interpreted, low_bits, dtype):
    update = interpreted("compact_kernel").update
    for numel in NUMELS:
        kernel, twin = (Trained(Device.of("cpu"), low_bits, numel, dtype) for _ in range(2))
        given = gradients(numel, dtype=dtype)
        bad = given[0].clone()
        bad[numel // 2], bad[numel // 3] = float("inf"), float("nan")
        for count, gradient in enumerate([*given, bad, given[1]], start=1):
            update(kernel.operands(gradient), kernel.scalars(count), compact.CONSTANTS)
            twin.step(gradient, count)
            assert_same(kernel, twin)
        before = kernel.stored()
        update(kernel.operands(given[0]), kernel.scalars(5, found_inf=1.0), compact.CONSTANTS)
        for now, was in zip(kernel.stored(), before, strict=True):
            assert torch.equal(_bytes(now), _bytes(was))


@pytest.mark.cuda
def test_cuda_makes_the_bytes_of_the_twin():
    """Of the same numbers: all binades, blocks of zeros, infinities and NaN; codes, scales, values and masters."""

    def everything(bits, random):
        noises = compact.random_parts(random)
        found = [
            *compact.split(bits, torch.int16),
            *compact.split(compact.rounded(bits, noises[0]), torch.int8),
        ]
        for name, noise in zip(compact.MOMENTS, noises[1:], strict=True):
            found += encoded(name, bits if name == "exp_avg" else bits & 0x7FFFFFFF, noise)
        return found

    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (4096, 64), generator=generator).to(torch.int32)
    near = (torch.randn(4096, 64, generator=generator) * 1e-4).view(torch.int32)
    both = torch.cat([bits, near, torch.zeros_like(near[:9])])
    finite = torch.where((both & 0x7F800000) == 0x7F800000, both & 0x7FFFFF, both)
    random = torch.randint(-(2**31), 2**31, both.shape, generator=generator).to(torch.int32)
    for given_bits in (both, finite):
        there = everything(given_bits.cuda(), random.cuda())
        for ours, theirs in zip(there, everything(given_bits, random), strict=True):
            assert torch.equal(_bytes(ours.cpu()), _bytes(theirs))


def _bytes(tensor):
    """With one NaN for all: which of them an operator makes is up to the device."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.cuda
@pytest.mark.parametrize(("low_bits", "dtype"), KINDS)
def test_an_update_on_cuda_makes_the_bytes_of_the_twin(low_bits, dtype):
    for numel in (*NUMELS, 100_032):
        on_gpu, twin = (Trained(Device.of(place), low_bits, numel, dtype) for place in ("cuda", "cpu"))
        for count, gradient in enumerate(gradients(numel, dtype=dtype), start=1):
            for each in (on_gpu, twin):
                each.step(gradient, count)
        assert_same(on_gpu, twin)
