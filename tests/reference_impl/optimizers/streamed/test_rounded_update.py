# SPDX-License-Identifier: Apache-2.0
"""Moments in bf16: the formula is torch's up to rounding, half masters lose nothing, a skipped step changes nothing."""

import pytest
import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import SGD, Adam
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.packing import Operands, RoundedUpdate, Scalars
from reference_impl.optimizers.streamed.storage import StateFormat

GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "maximize": False}
HYPER = {
    "AdamW": (Adam(), {}),
    "Adam, maximized": (Adam(decoupled=False), {"maximize": True}),
    "SGD": (SGD(), {"momentum": 0.9, "nesterov": False}),
    "SGD, Nesterov": (SGD(), {"momentum": 0.9, "nesterov": True}),
    "SGD without momentum": (SGD(), {"momentum": 0.0, "nesterov": False}),
}


def fp32_states(algorithm, numel, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(numel, generator=generator) for _ in range(2)]
    squares = torch.rand(numel, generator=generator)
    moments = [draw[1] / 4, squares][: len(algorithm.moments)]
    return draw[0].to(device), [each.to(device) for each in moments]


@pytest.mark.parametrize("name", HYPER)
def test_the_formula_is_that_of_torch(name):
    algorithm, hyper = HYPER[name]
    group, steps = {**GROUP, **hyper}, torch.tensor([1.0, 7.0])
    for step, numbers in zip(steps, algorithm.numbers_by_step(group, steps), strict=True):
        master, moments = fp32_states(algorithm, 1000)
        gradient = torch.randn(1000)
        ours = algorithm.formula(master, gradient, moments, numbers)
        algorithm.update(
            [master],
            [gradient.clone()],
            [[each] for each in moments],
            [step.clone()],
            group,
            grad_scale=None,
            found_inf=None,
        )
        for mine, theirs in zip(ours, (master, *moments), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


class Trained:
    """States of one piece as they are kept: bf16 moments, masters whole or as halves, or weights that are their own."""

    def __init__(self, device, *, halved, numel, algorithm=None, dtype=torch.bfloat16):
        self.algorithm = algorithm or Adam()
        self.group = {**self.algorithm.defaults, **GROUP}
        master, moments = fp32_states(self.algorithm, numel, device.torch_device)
        self.moments = [packing.integers(each.to(torch.bfloat16)) for each in moments]
        self.master, self.low = master, None
        self.weight = None if dtype == torch.float32 else master.to(dtype)
        if halved:
            high, self.low, flag = packing.split(master.view(torch.int32))
            self.weight, self.master = high.view(torch.bfloat16), None
            self.moments[-1] = packing.with_flag(self.moments[-1], flag)
        self.kernel = RoundedUpdate(device, self.algorithm)

    def operands(self, gradient):
        weight = self.weight if self.low is None else self.weight.view(torch.int16)
        return Operands(weight, self.low, self.master, gradient, self.moments)

    def scalars(self, device, *, count=1.0, found_inf=0.0, grad_scale=2.0, first=0):
        step = torch.tensor(count)
        numbers = self.algorithm.numbers_by_step(self.group, step[None])[0]
        each = (torch.tensor(first), step, numbers, torch.tensor(grad_scale), torch.tensor(found_inf))
        return Scalars(*(number.to(device) for number in each))

    def step(self, gradient, *, part=slice(None), **scalars):
        operands = self.operands(gradient).each(lambda each: each[part])
        self.kernel.update(operands, **self.scalars(gradient.device, **scalars)._asdict())

    def masters(self):
        if self.master is not None:
            return self.master.view(torch.int32)
        return packing.join(self.weight.view(torch.int16), self.low, self.moments[-1] < 0)

    def stored(self):
        kept = (self.weight, self.low, self.master, *(each.view(torch.bfloat16) for each in self.moments))
        return [_bytes(each.cpu()).clone() for each in kept if each is not None]


def _bytes(tensor):
    """With one NaN for all: the bits of a new one are up to the operator that makes it."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.view(torch.uint8)


def gradients(numel, device, dtype=torch.bfloat16):
    return torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(device.torch_device, dtype)


@pytest.mark.parametrize("numel", [64, 2**16 + 64])
def test_halves_lose_nothing(device, numel):
    whole, halved = (Trained(device, halved=each, numel=numel) for each in (False, True))
    for count in (1.0, 2.0, 3.0):
        for each in (whole, halved):
            each.step(gradients(numel, device), count=count)
        assert torch.equal(whole.masters(), halved.masters())
        assert torch.equal(whole.weight, halved.weight)
        assert torch.equal(whole.moments[0], halved.moments[0])
        assert torch.equal(whole.moments[1], halved.moments[1] & 0x7FFF)


@pytest.mark.parametrize("halved", [True, False])
def test_a_step_that_is_skipped_changes_no_bit(device, halved):
    trained = Trained(device, halved=halved, numel=4096)
    trained.step(gradients(4096, device))
    masters, stored = trained.masters().clone(), trained.stored()
    for bad in (float("nan"), float("inf")):
        # A first step that is skipped counts as none, and 1 - beta ** 0 is nothing to divide by.
        trained.step(torch.full_like(gradients(4096, device), bad), count=0.0, found_inf=1.0)
    assert torch.equal(trained.masters(), masters)
    assert all(torch.equal(now, before) for now, before in zip(trained.stored(), stored, strict=True))


def test_the_cut_of_pieces_changes_no_bit(device):
    """Elements are numbered across pieces, so the noise is that of the whole."""
    numel = 2**16 + 128
    whole, cut = (Trained(device, halved=True, numel=numel) for _ in range(2))
    gradient = gradients(numel, device)
    whole.step(gradient, first=64)
    for part in (slice(0, 64), slice(64, 2**16), slice(2**16, numel)):
        cut.step(gradient, first=64 + part.start, part=part)
    assert torch.equal(whole.masters(), cut.masters())
    assert all(torch.equal(one, other) for one, other in zip(whole.stored(), cut.stored(), strict=True))


def test_an_fp32_weight_is_its_own_master(device):
    trained = Trained(device, halved=False, numel=4096, dtype=torch.float32)
    before = trained.master.clone()
    trained.step(gradients(4096, device, torch.float32))
    assert (trained.master != before).float().mean() > 0.99


# Halves are of bf16 weights; other masters are whole, or the weights themselves.
KINDS = {
    "halves": {"halved": True},
    "masters of fp16": {"halved": False, "dtype": torch.float16},
    "own masters": {"halved": False, "dtype": torch.float32},
    "SGD": {"halved": False, "dtype": torch.float16, "algorithm": SGD()},
    "SGD, own masters": {"halved": False, "dtype": torch.float32, "algorithm": SGD()},
}
# A length that fills no program of the kernel, and one of several.
NUMELS = (1, 64, 4096 + 24)


def assert_same_bits(one, other):
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one.stored(), other.stored(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_makes_the_bits_of_the_twin(interpreted, kind):
    update, twin_device = interpreted("rounded_kernel").update, Device.of("cpu")
    dtype = KINDS[kind].get("dtype", torch.bfloat16)
    for numel in NUMELS:
        kernel, twin = (Trained(twin_device, numel=numel, **KINDS[kind]) for _ in range(2))
        gradient = gradients(numel, twin_device, dtype)
        bad = gradient.clone()
        bad[numel // 2], bad[numel // 3] = float("inf"), float("nan")
        # The last step is skipped.
        for count, given, found_inf in ((1, gradient, 0), (2, bad, 0), (3, gradient, 0), (4, gradient, 1)):
            scalars = kernel.scalars("cpu", count=float(count), first=2**31 - 700, found_inf=float(found_inf))
            update(kernel.algorithm.formula, kernel.operands(given), scalars)
            twin.step(given, count=float(count), first=2**31 - 700, found_inf=float(found_inf))
            assert_same_bits(kernel, twin)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [*KINDS, "masters of bf16"])
def test_cuda_makes_the_bits_of_the_twin(kind):
    own = KINDS.get(kind, {"halved": False})
    for numel in (*NUMELS, 100_032):
        there, here = (Trained(Device.of(place), numel=numel, **own) for place in ("cuda", "cpu"))
        for count in (1.0, 2.0):
            for each, place in ((there, Device.of("cuda")), (here, Device.of("cpu"))):
                each.step(gradients(numel, place, own.get("dtype", torch.bfloat16)), count=count)
            assert_same_bits(there, here)


class OfItsOwn(Adam):
    """A formula with Adam's moments, of which nothing else is known."""

    @property
    def formula(self):
        return lambda master, gradient, moments, numbers: (master, *moments)


@pytest.mark.parametrize("states", ["bf16-moments", "compact-8"])
def test_a_formula_that_the_kernels_lack_is_refused(monkeypatch, interpreted, states):
    interpreted("rounded_kernel")
    device = Device.of("cpu")
    monkeypatch.setattr(type(device), "compiles", True)
    with pytest.raises(ValueError, match=r"for OfItsOwn.*expected Adam"):
        StateFormat.of(states, OfItsOwn(), device)
    assert StateFormat.of("exact", Adam(), device).hi_lo_masters
    assert not StateFormat.of("exact", OfItsOwn(), device).hi_lo_masters
